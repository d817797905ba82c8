"""Models that every rank holds whole: what is tracked of them, and what each rank saves."""

from collections.abc import Mapping
from typing import Any

from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from prefect_torch_ddp.checkpoint.shard import Shard
from prefect_torch_ddp.checkpoint.state.own_state import OwnState
from prefect_torch_ddp.checkpoint.state.replicas import optimized
from prefect_torch_ddp.checkpoint.state.serial import has_buffers
from prefect_torch_ddp.checkpoint.state.whole import refuse_partial
from prefect_torch_ddp.rank.config import RankInfo


def whole(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects unwrapped; refuse those of which a rank has only a part."""
    for name, item in objects.items():
        refuse_partial(name, item)
    return {name: unwrapped(item) for name, item in objects.items()}


def unwrapped(item: Any) -> Any:
    """Return the bare module of a DDP or compiled one, whose weights load without a prefix.

    Anything else is returned as it is.
    """
    while isinstance(item, nn.Module):
        is_ddp = isinstance(item, DistributedDataParallel)
        inner = item.module if is_ddp else getattr(item, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            break
        item = inner
    return item


def dealt_out(objects: Mapping[str, Any], info: RankInfo) -> dict[Shard, Any]:
    """Return what a rank saves: its own states, and whole objects so that each is saved once.

    Only what is known to be the same everywhere is dealt out over the ranks. Rank 0 saves what a
    forward pass changes, such as BatchNorm's statistics, and what it may be the only one to update,
    such as averaged weights.
    """
    trained = set(map(id, optimized(objects)))
    shares: dict[Shard, Any] = {}
    for i, (name, item) in enumerate(objects.items()):
        is_same = isinstance(item, optim.Optimizer) or (
            isinstance(item, nn.Module)
            and _has_only_parameters(item)
            and trained.issuperset(map(id, item.parameters()))
        )
        if isinstance(item, OwnState):
            shares[Shard.of_rank(name, info.rank)] = item
        elif (i % info.world_size if is_same else 0) == info.rank:
            shares[Shard(name)] = item
    return shares


def _has_only_parameters(module: nn.Module) -> bool:
    """Tell whether a module has parameters, and nothing else in its state."""
    own = ("get_extra_state", "_save_to_state_dict", "state_dict")
    return (
        next(module.parameters(), None) is not None
        and not has_buffers(module)
        and all(
            getattr(type(part), name) is getattr(nn.Module, name)
            for part in module.modules()
            for name in own
        )
    )
