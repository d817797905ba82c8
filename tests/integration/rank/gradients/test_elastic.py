"""Elastic determinism: the same bits for every number of ranks that divides the virtual ranks;
what can't be so is refused."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, read_ledger
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.stages import run_with_context
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.rank.loop.test_steps import expected_gradients
from tests.support.ranks import Died, run_ranks
from tests.workloads import healthy


def config_for(folder: Path, virtual_ranks: int, **options: Any) -> RankConfig:
    """Describe an elastic training with a checkpoint at each step; claims the run's next
    attempt."""
    storage = DirectoryStorage(folder)
    attempt = claim_attempt(storage, "run")
    policy = CheckpointParams(every_steps=1, every_s=None)
    common: dict[str, Any] = {"options": options, "checkpoint": policy, "determinism": "elastic"}
    return RankConfig("run", attempt, "train", storage, virtual_ranks=virtual_ranks, **common)


# ---- The tree.


# ---- The same bits.


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train undisturbed on one rank with four virtual ones."""
    (value,) = run_ranks(
        run_with_context, 1, config_for(tmp_path_factory.mktemp("one"), 4), healthy.fit_elastic
    )
    return value


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_two_and_four_ranks_end_with_the_same_bits(
    tmp_path: Path, expected: dict[str, Any], world_size: int
) -> None:
    """SHA-256 of the weights, with convolution, dropout, augmentation, clipping and AdamW, over
    uneven tails."""
    values = run_ranks(run_with_context, world_size, config_for(tmp_path, 4), healthy.fit_elastic)
    assert values == [expected] * world_size
    assert expected["steps"] == 8


def test_the_default_differs(tmp_path: Path) -> None:
    """The test above could fail: without elastic determinism two ranks and one end with other
    bits."""
    config = replace(config_for(tmp_path / "a", 4), determinism="default", virtual_ranks=None)
    values = run_ranks(run_with_context, 2, config, healthy.fit_elastic)
    (alone,) = run_ranks(
        run_with_context,
        1,
        replace(config, storage=DirectoryStorage(tmp_path / "b")),
        healthy.fit_elastic,
    )
    assert values[0] == values[1] != alone


def test_another_number_of_virtual_ranks_is_another_training(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    """Six virtual ranks on 1, 2, 3 and 6 ranks, where branches don't fall together with
    ranks."""
    values = [
        run_ranks(run_with_context, n, config_for(tmp_path / str(n), 6), healthy.fit_elastic)
        for n in (1, 2, 3, 6)
    ]
    assert all(value == values[0][0] for of_ranks in values for value in of_ranks)
    assert values[0][0]["sha256"] != expected["sha256"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_samples": 2},
        {"precision": "bfloat16"},
        {"precision": "scaled", "max_samples": 2},
        {"global_batch_size": 22},
        {"sharded": True},
    ],
    ids=["micro-batches", "autocast", "scaler", "a tail of one", "shards"],
)
def test_it_holds_for_other_trainings(tmp_path: Path, options: dict[str, Any]) -> None:
    """Smaller micro-batches, mixed precision, a tail in which most ranks have nothing, data in
    shards."""
    runs = [
        run_ranks(
            run_with_context, n, config_for(tmp_path / str(n), 4, **options), healthy.fit_elastic
        )
        for n in (1, 4)
    ]
    assert all(value == runs[0][0] for of_ranks in runs for value in of_ranks)


def test_data_workers_change_nothing(tmp_path: Path, expected: dict[str, Any]) -> None:
    """Augmentation draws the same in worker processes and in the rank."""
    with RankContext.local(
        storage=tmp_path, options={"num_workers": 2}, determinism="elastic", virtual_ranks=4
    ) as ctx:
        assert healthy.fit_elastic(ctx) == expected


def test_a_local_context_gives_the_same_bits(tmp_path: Path, expected: dict[str, Any]) -> None:
    """In a debugger too, and torch has its settings back afterwards."""
    before = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )
    with RankContext.local(
        storage=tmp_path, run_id="run", determinism="elastic", virtual_ranks=4
    ) as ctx:
        assert torch.get_num_threads() == 1
        assert healthy.fit_elastic(ctx) == expected
    after = (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )
    assert after == before


def test_four_then_two_then_one_then_four_ranks_by_kills(
    tmp_path: Path, expected: dict[str, Any]
) -> None:
    """SIGKILL between two micro-batches three times, another number of ranks each time: the
    same bits, each sample once."""
    plan = {
        1: {"step": 3, "how": "SIGKILL"},
        2: {"step": 5, "how": "SIGKILL"},
        3: {"step": 7, "how": "SIGKILL"},
    }
    for world_size in (4, 2, 1):
        config = replace(config_for(tmp_path, 4), ledger=True)
        assert Died(-9) in run_ranks(
            run_with_context, world_size, config, healthy.fit_elastic, (str(tmp_path), plan)
        )
    assert (
        run_ranks(
            run_with_context, 4, replace(config_for(tmp_path, 4), ledger=True), healthy.fit_elastic
        )
        == [expected] * 4
    )
    report = read_ledger(tmp_path, "run")
    assert report.is_clean, str(report)
    assert [epoch.num_samples for epoch in report.epochs] == [healthy.NUM_SAMPLES] * healthy.EPOCHS


# ---- The gradient.


def gradients_of_epoch(ctx: RankContext, num_samples: int, batch_size: int) -> list[torch.Tensor]:
    """Return the flat gradient of every step of an epoch; a stand-in's loss is nan; one
    parameter is used by one sample alone."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    net.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    model = ctx.wrap(net)
    found = []
    loader = ctx.loader(TensorDataset(*healthy.points(num_samples)), global_batch_size=batch_size)
    for batch in ctx.steps(loader, epochs=1):
        model.zero_grad(set_to_none=ctx.step % 2 == 0)
        is_stand_in = ctx._state.share.num_local == 0
        for (inputs, targets), weight in ctx.micro_batches(batch, max_samples=2):
            loss = nn.functional.cross_entropy(model(inputs), targets) * weight
            (loss * float("nan") if is_stand_in else loss).backward()
        assert net.unused.grad is None
        found.append(torch.cat([parameter.grad.flatten() for parameter in net[0].parameters()]))
        found[-1] = torch.cat(
            [found[-1], *(parameter.grad.flatten() for parameter in net[2].parameters())]
        )
    return found


@pytest.mark.parametrize(
    ("world_size", "num_samples", "batch_size"), [(1, 11, 5), (2, 13, 6), (3, 10, 8)]
)
def test_gradients_are_those_of_the_global_batch(
    tmp_path: Path, world_size: int, num_samples: int, batch_size: int
) -> None:
    """On each rank, also with a tail smaller than the world; a parameter that nobody uses has
    none."""
    values = run_ranks(
        run_with_context,
        world_size,
        config_for(tmp_path, 6),
        gradients_of_epoch,
        (num_samples, batch_size),
    )
    expected = expected_gradients(num_samples, batch_size)
    for found in values:
        for gradient, right in zip(found, expected, strict=True):
            assert torch.allclose(gradient, right, rtol=0, atol=1e-12)
        assert all(torch.equal(one, other) for one, other in zip(found, values[0], strict=True))


# ---- Refusals.


def test_ranks_that_do_not_divide_the_virtual_ones_are_refused(tmp_path: Path) -> None:
    """Before anything else; and so is no number of them."""
    with pytest.raises(AssertionError, match="virtual_ranks is 4 and there are 3 ranks"):
        run_ranks(run_with_context, 3, config_for(tmp_path, 4), healthy.fit_elastic)
    for determinism, virtual_ranks, says in [
        (
            "elastic",
            None,
            "determinism is 'elastic', but virtual_ranks is empty: give the most ranks",
        ),
        ("elastic", 0, "virtual_ranks is 0"),
        ("default", 4, "virtual_ranks is 4, which needs determinism='elastic'"),
        ("perfect", 4, "determinism is 'perfect'; choose one of default, elastic"),
    ]:
        with pytest.raises(InvalidParamsError, match=says):
            RankContext.local(determinism=determinism, virtual_ranks=virtual_ranks)
