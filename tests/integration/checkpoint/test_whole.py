"""Objects that are sharded over ranks are refused by name, and can be saved by hand."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from prefect_torch_ddp import InvalidParamsError, RankContext
from prefect_torch_ddp.checkpoint.state.whole import refuse_partial, refuse_sharded
from tests.support.ranks import config_for, run_ranks, train_on

pytestmark = pytest.mark.timeout(120)


def sharded(world_size: int) -> nn.Module:
    """Make a model whose parameters are spread over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model


def track_sharded(ctx: RankContext, what: str) -> str:
    """Track such a model, or its optimizer; return the error."""
    model = sharded(ctx.world_size)
    tracked = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    try:
        ctx.track(**{what: tracked[what]})
    except InvalidParamsError as error:
        return str(error)
    return "it was tracked"


@pytest.mark.parametrize(
    ("what", "place"), [("model", "0.weight"), ("optimizer", "a parameter of group 0")]
)
def test_what_is_sharded_is_refused_when_it_is_tracked(
    tmp_path: Path, what: str, place: str
) -> None:
    """Every rank's error names the object, the tensor and the way out."""
    for said in train_on(2, config_for(tmp_path), track_sharded, what):
        begin = f"{what!r} can't be tracked: {place} is sharded over a mesh of 2 ranks"
        assert said.startswith(begin)
        assert "torch.distributed.checkpoint" in said


def state_of_a_holder() -> str:
    """Return the error of a state in which a sharded model is deep inside."""
    try:
        refuse_sharded("holder", {"inner": [sharded(2).state_dict()], "step": 3})
    except InvalidParamsError as error:
        return str(error)
    return "it was saved"


def test_a_sharded_tensor_deep_in_a_state_is_refused_at_the_save() -> None:
    """The save finds a sharded tensor that only the object's `state_dict` shows."""
    (said, _) = run_ranks(state_of_a_holder, 2)
    assert said.startswith("'holder' can't be tracked: inner[0].0.weight is sharded over a mesh")


def track_on_one(ctx: RankContext, how: str) -> str:
    """Track a model whose tensors are spread over a mesh, though this rank has all of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    if ctx.world_size == 1:
        torch.distributed.init_process_group(
            store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    model = nn.Linear(4, 8)
    if how == "replicated":
        model = distribute_module(model, init_device_mesh("cpu", (ctx.world_size,)))
    else:
        model = sharded(ctx.world_size)
    try:
        ctx.track(model=model)
    except InvalidParamsError as error:
        return str(error)
    return "it was tracked"


@pytest.mark.parametrize(("how", "num_ranks"), [("sharded", 1), ("replicated", 2)])
def test_a_dtensor_that_is_whole_is_refused_too(tmp_path: Path, how: str, num_ranks: int) -> None:
    """A replicated DTensor is refused, since a checkpoint couldn't be read without its mesh."""
    for said in train_on(num_ranks, config_for(tmp_path), track_on_one, how):
        ranks = "1 rank" if num_ranks == 1 else "2 ranks"
        assert f"weight is a DTensor on a mesh of {ranks}, and a checkpoint holds plain" in said
        assert "is sharded over" not in said


class FullyShardedDataParallel(nn.Linear):
    """Named as torch's, whose state_dict is a collective."""


def test_a_collective_state_dict_is_refused_before_it_is_called() -> None:
    """A `state_dict` that is a collective is refused, since one rank would wait in it forever."""
    with pytest.raises(InvalidParamsError, match="whose state is spread over the ranks; save it"):
        refuse_partial("model", FullyShardedDataParallel(1, 1))
    refuse_partial("model", nn.Linear(1, 1))


def track_flat(ctx: RankContext) -> str:
    """Track a plain module with a part that is torch's older FSDP; return the error."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Flat

    inner = Flat(nn.Linear(4, 4), device_id=torch.device("cpu"))
    try:
        ctx.track(model=nn.Sequential(inner, nn.Linear(4, 2)))
    except InvalidParamsError as error:
        return str(error)
    return "it was tracked"


def test_a_part_of_a_module_whose_state_is_a_collective_is_refused(tmp_path: Path) -> None:
    """`ctx.track` names an FSDP module inside a plain one, whose parameters look plain."""
    for said in train_on(2, config_for(tmp_path), track_flat):
        begin = "'model' can't be tracked: 0 is torch.distributed.fsdp's FullyShardedDataParallel"
        assert said.startswith(begin)


class GatheringModule(nn.Linear):
    """A module of an unknown class whose state_dict talks to the other ranks."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        torch.distributed.all_reduce(torch.ones(1))
        return super().state_dict(*args, **kwargs)


class GatheringOptimizer(torch.optim.SGD):
    """An optimizer of an unknown class whose state_dict talks to the other ranks."""

    def state_dict(self) -> dict[str, Any]:
        torch.distributed.all_reduce(torch.ones(1))
        return super().state_dict()


def track_gathering_class(ctx: RankContext, what: str) -> str:
    """Track one of them; return the error."""
    model = GatheringModule(2, 2)
    item = model if what == "model" else GatheringOptimizer(model.parameters(), 0.1)
    try:
        ctx.track(**{what: item})
    except InvalidParamsError as error:
        return str(error)
    return "it was tracked"


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_module_or_optimizer_that_gathers_is_refused_in_track(tmp_path: Path, what: str) -> None:
    """An unknown class is refused by what its `state_dict` does, before the first save."""
    for said in train_on(2, config_for(tmp_path), track_gathering_class, what):
        assert said.startswith(f"{what!r} can't be tracked: its state_dict calls the collective")


@dataclass
class Gathering:
    """An object whose state_dict talks to the other ranks, at once or later."""

    model: nn.Module
    gathers: bool = True

    def state_dict(self) -> dict[str, Any]:
        if not self.gathers:
            return {}
        options = StateDictOptions(full_state_dict=True)
        return get_model_state_dict(self.model, options=options)

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def track_gathering(ctx: RankContext, *, from_start: bool) -> None:
    """Track such an object, and save."""
    app = Gathering(sharded(ctx.world_size), from_start)
    ctx.track(first=nn.Linear(1, 1), app=app)
    app.gathers = True
    ctx.checkpoint(force=True)


@pytest.mark.parametrize("from_start", [True, False], ids=["in track", "at the save"])
def test_a_state_dict_that_gathers_is_refused(tmp_path: Path, *, from_start: bool) -> None:
    """The collective never begins, since a single rank would wait forever or get SIGABRT."""
    said = "'app' can't be tracked: its state_dict calls the collective all_gather"
    with pytest.raises(AssertionError, match=said):
        train_on(2, config_for(tmp_path), partial(track_gathering, from_start=from_start))


def save_by_hand(folder: str, num_steps: int) -> tuple[int, list[float]]:
    """Train a sharded model as in recipes/sharded.md; return its first step and its weights."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(model.parameters())

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": torch.tensor(step)}

    step = 0
    if saved := sorted(Path(folder).glob("step-*/.metadata")):  # written last
        dcp.load(found := state(0), checkpoint_id=saved[-1].parent)
        states = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
        set_state_dict(model, optimizer, **states)
        step = int(found["step"])
    begun = step
    for step in range(begun + 1, num_steps + 1):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step % 2 == 0:
            dcp.save(state(step), checkpoint_id=f"{folder}/step-{step:08d}")
    weights = [each.full_tensor().sum().item() for each in model.parameters()]
    return begun, weights


@pytest.mark.extended
def test_a_sharded_model_can_be_saved_by_hand(tmp_path: Path) -> None:
    """The recipe of docs/recipes/sharded.md resumes to the undisturbed weights."""
    (undisturbed, _) = run_ranks(save_by_hand, 2, str(tmp_path / "a"), 6)
    run_ranks(save_by_hand, 2, str(tmp_path / "b"), 4)
    (resumed, _) = run_ranks(save_by_hand, 2, str(tmp_path / "b"), 6)
    assert (undisturbed[0], resumed[0]) == (0, 4)
    assert resumed[1] == undisturbed[1]
