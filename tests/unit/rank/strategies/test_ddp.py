"""A model in DDP can be copied, averaged, saved and deleted; and micro-batches."""

import copy
import gc
import io
import weakref
from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from prefect_torch_ddp.checkpoint.state.serial import load_state, state_of
from prefect_torch_ddp.data.sampler import BatchShare, GlobalBatches
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import RankInfo
from prefect_torch_ddp.rank.strategies.ddp import ShareWeights
from prefect_torch_ddp.rank.strategies.held import GradientWatch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradient(model: nn.Module) -> float:
    """Return the gradient of one backward pass from ones."""
    model.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return parameter.grad.item()


def test_a_copy_is_trained_by_share_as_well() -> None:
    """Plain averaging would count an uneven tail wrongly, silently; the copy's weights are its
    own."""
    # The group has one rank, of two that share the batch: 3 samples of 4 are here.
    weights = ShareWeights(RankInfo(world_size=2))
    model = weights.wrap(nn.Linear(1, 1, bias=False), CPU, {})
    copied = copy.deepcopy(model)
    assert str(copied) == str(model)
    weights.begin_step(1, BatchShare(1, 0, num_local=3, num_global=4, is_last=True))
    assert [gradient(model), gradient(copied)] == [0.75, 0.75]
    with torch.no_grad():
        next(copied.parameters()).fill_(7)
    assert next(model.parameters()).item() != 7


def test_buckets_are_laid_out_in_wrap_after_a_checkpoint_too() -> None:
    """They aren't if a parameter has hooks, but those of a checkpoint don't count."""
    weights, net = ShareWeights(RankInfo(world_size=2)), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    weights.wrap(net, CPU, {})(torch.ones(1, 1)).sum().backward()
    GradientWatch().hold({"optimizer": optimizer}, 1)
    assert net.weight._backward_hooks
    assert weights.wrap(net, CPU, {})._has_rebuilt_buckets
    net.weight.register_hook(lambda _: None)
    assert not weights.wrap(net, CPU, {})._has_rebuilt_buckets


def test_averaged_and_saved_as_plain_ddp() -> None:
    """`AveragedModel` takes it, and what `torch.save` writes is a plain DDP."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1)).eval()
    model = ShareWeights(RankInfo(world_size=2)).wrap(net, CPU, {})
    model(torch.ones(1, 1)).sum().backward()  # with which it has sent its buffers
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"prefect_torch_ddp" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is DistributedDataParallel
    x = torch.ones(1, 1)
    assert model(x) == averaged(x) == loaded(x)


def test_names_inside_a_module_are_those_of_one_rank() -> None:
    """So a checkpoint and an exported model fit any number of ranks: plain PyTorch's names, in
    its order, with the _metadata; and it is loaded into both."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    on_one, on_two = (
        AveragedModel(ShareWeights(RankInfo(world_size=n)).wrap(net(), CPU, {})) for n in (1, 2)
    )
    saved = state_of(on_two)
    assert list(saved) == list(on_one.state_dict())
    assert saved._metadata == on_one.state_dict()._metadata
    load_state(on_one, saved)
    assert torch.equal(on_one.module[0].weight, on_two.module.module[0].weight)
    with torch.no_grad():
        on_one.module[0].weight.fill_(7)
    load_state(on_two, state_of(on_one))
    assert on_two.module.module[0].weight.tolist() == [[7, 7], [7, 7]]
    wraps_twice = nn.ModuleDict({"a": nn.ModuleDict({"module": on_two}), "b": on_two})
    load_state(wraps_twice, state_of(wraps_twice))
    assert list(state_of(wraps_twice))[:2] == ["a.module.n_averaged", "a.module.module.0.weight"]


def test_a_model_that_nobody_holds_is_freed() -> None:
    """Else a cross-validation fills the memory with the models of earlier folds."""
    weights = ShareWeights(RankInfo(world_size=2))
    model = weights.wrap(nn.Linear(1, 1, bias=False), CPU, {})
    gradient(model)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
    for (x,), _ in weights.micro_batches((torch.ones(2, 1),), 1):
        assert len(x) == 1


def test_a_group_of_some_ranks_is_refused() -> None:
    """A model of a smaller group would get gradients that are too small."""
    others = dist.GroupMember.NON_GROUP_MEMBER  # what a rank outside of a group is given
    with pytest.raises(InvalidParamsError, match="a process group of other ranks than all"):
        ShareWeights(RankInfo(world_size=2)).wrap(nn.Linear(1, 1), CPU, {"process_group": others})
    group = dist.new_group([0])
    net = nn.Linear(1, 1, bias=False)
    assert (
        gradient(ShareWeights(RankInfo(world_size=2)).wrap(net, CPU, {"process_group": group})) == 1
    )


def test_another_hook_is_refused() -> None:
    """The model's own hook sums by share, and DDP takes only one."""
    model: Any = ShareWeights(RankInfo(world_size=2)).wrap(nn.Linear(1, 1), CPU, {})
    with pytest.raises(InvalidParamsError, match="register_comm_hook can't be called"):
        model.register_comm_hook(None, None)


def test_a_static_graph_is_refused_whose_first_pass_is_not_summed() -> None:
    """Before the first summed pass `no_sync` and several micro-batches are refused in words."""
    weights = ShareWeights(RankInfo(world_size=2))
    model: Any = weights.wrap(nn.Linear(1, 1, bias=False), CPU, {"static_graph": True})
    with pytest.raises(InvalidParamsError, match="learns the graph from the first"):
        model.no_sync()
    with pytest.raises(InvalidParamsError, match="learns the graph from the first"):
        next(weights.micro_batches(torch.ones(2, 1), 1))
    assert len(list(weights.micro_batches(torch.ones(2, 1), 2))) == 1
    gradient(model)
    with model.no_sync():
        assert gradient(model) == 1
    assert len(list(weights.micro_batches(torch.ones(2, 1), 1))) == 2


def test_micro_batches_left_half_way_are_an_error() -> None:
    """Otherwise each rank would step by a different gradient."""
    weights = ShareWeights(RankInfo(world_size=2))
    model = weights.wrap(nn.Linear(1, 1, bias=False), CPU, {})
    for step in (1, 2):
        weights.begin_step(step, BatchShare(1, 0, num_local=2, num_global=4, is_last=False))
        for (x,), weight in weights.micro_batches((torch.ones(2, 1),), 1):
            (model(x).sum() * weight).backward()
            if step == 2:
                break
        if step == 1:
            weights.end_step(step)
    says = r"step 2 left ctx\.micro_batches before the last micro-batch"
    with pytest.raises(InvalidParamsError, match=says):
        weights.end_step(2)


@pytest.mark.parametrize(("num_samples", "global_batch_size"), [(11, 4), (12, 3)])
def test_layers_that_talk_to_other_ranks_need_equal_shares(
    num_samples: int, global_batch_size: int
) -> None:
    """SyncBatchNorm is refused before the first step if batches can't be shared equally."""
    weights = ShareWeights(RankInfo(world_size=2))
    model = weights.wrap(nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), CPU, {})
    nn.SyncBatchNorm.convert_sync_batchnorm(model)  # behind wrap, since DDP wants a GPU for it
    uneven = GlobalBatches(num_samples, global_batch_size)
    with pytest.raises(InvalidParamsError, match=r"SyncBatchNorm \(1\) needs equal shares"):
        weights.begin_loop(uneven)
    weights.begin_loop(GlobalBatches(11, 4, drop_last=True))
    model.eval()  # such as frozen statistics
    weights.begin_loop(uneven)
    weights.end_step(1)
    weights.begin_loop(uneven)
    model.train()  # in the step's body
    with pytest.raises(InvalidParamsError, match=r"SyncBatchNorm \(1\) needs equal shares"):
        weights.end_step(1)


# ---- Micro-batches: batches of every structure are cut, or refused by name.

X = torch.zeros(3)
Pair = namedtuple("Pair", "images labels")  # noqa: PYI024 - the kind that a user's collate_fn gives


def parts_of(batch: Any, max_samples: int | None) -> list[tuple[Any, float]]:
    """Cut a batch outside of a training."""
    return list(ShareWeights(RankInfo(world_size=1)).micro_batches(batch, max_samples))


def test_every_kind_of_batch_is_cut_alike() -> None:
    """Tensors, tuples, lists, named tuples, nested ones, names of samples: the same rows of each,
    nothing lost; a mapping of any class becomes a plain dict; one number or text is for all."""
    x, y = torch.arange(10).reshape(5, 2), torch.arange(5)
    names = list("abcde")
    for batch, get in [
        (x, lambda part: (part,)),
        ((x, y), lambda part: part),
        ([x, y], tuple),
        (Pair(x, y), lambda part: (part.images, part.labels)),
        ({"x": x, "y": y}, lambda part: (part["x"], part["y"])),
        (UserDict(x=x, y=y), lambda part: (part["x"], part["y"])),
        ((UserDict(x=UserDict(x=x)), y), lambda part: (part[0]["x"]["x"], part[1])),
        (({"x": [x, None]}, y), lambda part: (part[0]["x"][0], part[1])),
    ]:
        parts = parts_of(batch, 2)
        kind = dict if isinstance(batch, UserDict) else type(batch)
        assert {type(part) for part, _ in parts} == {kind}
        assert [weight for _, weight in parts] == [2 / 5, 2 / 5, 1 / 5]
        for i, column in enumerate(get(batch)):
            assert torch.equal(torch.cat([get(part)[i] for part, _ in parts]), column)
    paths = [{"path": name, "of": {"id": 1}} for name in names]
    for plain in (names, ["a", None, 3, None, "e"], paths, tuple(names)):
        assert [part[1] for part, _ in parts_of((x, plain), 3)] == [plain[:3], plain[3:]]
    for whole in (
        [{}],
        [{"n": None}],
        "train",
        3,
        0.5,
        True,
        np.float32(2),
        None,
        {"scale": 2, "language": "en"},
    ):
        assert [part[1] for part, _ in parts_of((x, whole), 3)] == [whole, whole]
    ((uncut, weight),) = parts_of((x, y), None)
    assert (uncut[0].shape, weight) == (x.shape, 1.0)


@pytest.mark.parametrize(
    ("batch", "max_samples", "says"),
    [
        ((torch.zeros(5, 2), X), 2, r"batch\[1\]: it has 3 rows where this rank's share has 5"),
        ({"x": X, "scale": torch.tensor(2.0)}, 2, r"batch\['scale'\]: it is a single number"),
        ((X, np.zeros(3)), 2, r"batch\[1\], a ndarray"),
        ((X, [{"id": 1}]), 2, r"batch\[1\]: it has 1 rows"),
        ("train", 2, "a str without a tensor"),
        (({"x": object()},), 2, r"batch\[0\]\['x'\], a object"),
        ((), 2, "a tuple without a tensor"),
        (torch.zeros(0, 2), 2, "it has 0 rows"),
        (X, 0, "max_samples is 0"),
        (X, 2.5, r"max_samples is 2\.5"),
        ((X, ["a", "b"]), 2, r"batch\[1\]: it has 2 rows"),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, max_samples: Any, says: str) -> None:
    """The error names the value and its place in the batch."""
    with pytest.raises(InvalidParamsError, match=says):
        parts_of(batch, max_samples)


def test_a_batch_of_something_else_than_samples_is_refused() -> None:
    """In a step the share's size is known: images of a list, each with channels first, aren't
    cut by channels."""
    weights = ShareWeights(RankInfo(world_size=1))
    weights.begin_step(1, BatchShare(1, 0, num_local=4, num_global=4, is_last=True))
    says = r"batch\[0\]: it has 3 rows where this rank's share has 4 samples"
    with pytest.raises(InvalidParamsError, match=says):
        list(weights.micro_batches([torch.zeros(3, 8, 8)] * 4, 2))


@pytest.mark.parametrize(("num_rows", "hints"), [(3, True), (5, False)])
def test_a_batch_with_fewer_rows_than_samples_may_lack_some(num_rows: int, *, hints: bool) -> None:
    """A warning says so, since a collate_fn that leaves samples out gives such a batch."""
    weights = ShareWeights(RankInfo(world_size=1))
    weights.begin_step(1, BatchShare(1, 0, num_local=4, num_global=4, is_last=True))
    with pytest.raises(InvalidParamsError) as caught:
        list(weights.micro_batches(torch.zeros(num_rows, 2), 2))
    assert ("if collate_fn leaves samples out, leave them out of the" in str(caught.value)) is hints
