"""What elastic determinism refuses, and its order of summation."""

import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.assembly import ContextAssembly
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.strategies.tree import TreeSum, branches_of
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.workloads import healthy


def tree_of(num_leaves: int, push: list[tuple[range, str]]) -> list[tuple[range, str]]:
    """Return the remaining value when values are pushed that show how they were added."""
    tree: TreeSum[str] = TreeSum(num_leaves, lambda left, right: f"({left}+{right})")
    for leaves, value in push:
        tree.push(leaves, value)
    return tree.branches


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.data())
def test_the_order_of_summation_does_not_depend_on_who_adds(
    num_leaves: int, data: st.DataObject
) -> None:
    """Ranks that add their parts first get the same brackets as a single rank."""
    leaves = [(range(leaf, leaf + 1), str(leaf)) for leaf in range(num_leaves)]
    ((whole, brackets),) = tree_of(num_leaves, leaves)
    assert whole == range(num_leaves)
    world_size = data.draw(
        st.sampled_from([size for size in range(1, num_leaves + 1) if num_leaves % size == 0])
    )
    each = num_leaves // world_size
    held = [
        tree_of(num_leaves, leaves[rank * each : (rank + 1) * each]) for rank in range(world_size)
    ]
    for rank, of_rank in enumerate(held):
        own = range(rank * each, (rank + 1) * each)
        assert branches_of(own, num_leaves) == [branch for branch, _ in of_rank]
    assert tree_of(num_leaves, list(itertools.chain(*held))) == [(whole, brackets)]
    if each & (each - 1) == 0 and num_leaves & (num_leaves - 1) == 0:
        # Powers of two: each rank sends one sum, as a ring all-reduce does.
        assert {len(branches) for branches in held} == {1}


def local(**options: Any) -> RankContext:
    """Make an elastic context here."""
    return RankContext.local(determinism="elastic", **{"virtual_ranks": 2, **options})


def batches(ctx: RankContext) -> Any:
    """Begin to train on 8 points."""
    return ctx.steps(ctx.loader(TensorDataset(*healthy.points(8)), global_batch_size=4), epochs=1)


BY_MICRO_BATCHES = r"`for piece, weight in ctx\.micro_batches\(batch\):`"
NOT_ALL = r"step 1 was taken without going through all of ctx\.micro_batches"


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda _ctx, batch: tuple(batch), BY_MICRO_BATCHES),
        (lambda _ctx, batch: batch["inputs"].to("cpu"), BY_MICRO_BATCHES),
        (lambda _ctx, _batch: None, NOT_ALL),
        (lambda ctx, batch: next(ctx.micro_batches(batch)), NOT_ALL),
        (lambda ctx, _batch: list(ctx.micro_batches(torch.zeros(4))), "got a Tensor; pass the"),
    ],
)
def test_a_step_without_micro_batches_is_refused(use: Callable[..., object], says: str) -> None:
    """However the batch is used, and also when it isn't."""
    with local() as ctx, pytest.raises(InvalidParamsError, match=says):
        ctx.wrap(nn.Linear(4, 3).double())
        for batch in batches(ctx):
            use(ctx, batch)


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs * self.weight


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.BatchNorm1d(4).double(), r"1 \(BatchNorm1d\): running .*GroupNorm or LayerNorm"),
        (nn.SyncBatchNorm(4, track_running_stats=False).double(), r"1 \(SyncBatchNorm\)"),
        (Counting(), r"the buffers 1\.calls \(Counting\) change in the forward pass"),
        (nn.BatchNorm1d(4, track_running_stats=False).double(), None),
        (nn.BatchNorm1d(4).double().eval(), None),
    ],
)
def test_buffers_that_depend_on_the_batch_are_refused_by_name(
    layer: nn.Module, says: str | None
) -> None:
    """Before the first step is taken; frozen ones and those without running statistics may
    stay."""
    refused = nullcontext() if says is None else pytest.raises(InvalidParamsError, match=says)
    with refused, local() as rank:
        model = rank.wrap(nn.Sequential(nn.Linear(4, 4).double(), layer))
        for batch in batches(rank):
            for (inputs, _targets), weight in rank.micro_batches(batch):
                (model(inputs).square().mean() * weight).backward()


def test_sparse_gradients_are_refused_by_name() -> None:
    """They have no order of summation of ours."""
    says = "the gradient of weight is sparse"
    with local() as ctx, pytest.raises(InvalidParamsError, match=says):
        model = ctx.wrap(nn.Embedding(4, 2, sparse=True))
        for batch in batches(ctx):
            for (_inputs, targets), weight in ctx.micro_batches(batch):
                (model(targets).mean() * weight).backward()


def test_models_that_are_wrapped_one_by_one_hide_nothing_of_each_other() -> None:
    """Not a parameter by its name and the number of its model, and not a buffer by its name."""
    says = r"the gradient of 1\.weight is sparse"
    with local() as ctx, pytest.raises(InvalidParamsError, match=says):
        model = ctx.wrap(nn.Sequential(nn.Identity(), nn.Embedding(4, 2, sparse=True)))
        ctx.wrap(nn.Linear(2, 1))
        for batch in batches(ctx):
            for (_inputs, targets), weight in ctx.micro_batches(batch):
                (model(targets).mean() * weight).backward()

    says = r"the buffers calls \(Counting\) change in the forward pass"
    with local() as ctx, pytest.raises(InvalidParamsError, match=says):
        used, _ = ctx.wrap(Counting()), ctx.wrap(Counting())
        for batch in batches(ctx):
            for (inputs, _targets), weight in ctx.micro_batches(batch):
                (used(inputs).mean() * weight).backward()


def test_a_model_of_an_earlier_fold_is_freed() -> None:
    """And the next one is trained without it."""
    with local() as rank:
        seen = []
        for _fold in range(2):
            model = rank.wrap(nn.Linear(4, 3).double())
            seen.append(weakref.ref(model))
            for batch in batches(rank):
                for (inputs, _targets), weight in rank.micro_batches(batch):
                    (model(inputs).mean() * weight).backward()
                assert model.weight.grad is not None
                assert all(model() is None for model in seen[:-1])
        del model
        gc.collect()
        assert [model() for model in seen] == [None, None]


def test_ranks_that_do_not_divide_the_virtual_ones_are_refused(tmp_path: Path) -> None:
    """A number of ranks that doesn't divide them, or no number, is refused first."""
    elastic: dict[str, Any] = {"determinism": "elastic", "virtual_ranks": 4}
    config = RankConfig("run", 1, "train", DirectoryStorage(tmp_path), **elastic)
    with pytest.raises(InvalidParamsError, match="virtual_ranks is 4 and there are 3 ranks"):
        ContextAssembly(config, RankInfo(0, 3))
    empty = "determinism is 'elastic', but virtual_ranks is empty: give the most ranks"
    for determinism, virtual_ranks, says in [
        ("elastic", None, empty),
        ("elastic", 0, "virtual_ranks is 0"),
        ("default", 4, "virtual_ranks is 4, which needs determinism='elastic'"),
        ("perfect", 4, "determinism is 'perfect'; choose one of default, elastic"),
    ]:
        with pytest.raises(InvalidParamsError, match=says):
            RankContext.local(determinism=determinism, virtual_ranks=virtual_ranks)
