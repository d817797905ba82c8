"""Whether an object's state is whole on one rank: of what is sharded, a checkpoint had a part.

Each tracked object is written by one rank and restored on all of them. Sharded models come later;
until then they are refused by name.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prefect_torch_ddp.checkpoint.state.serial import state_of
from prefect_torch_ddp.errors import InvalidParamsError

_COLLECTIVE = {
    "FullyShardedDataParallel": "torch.distributed.fsdp's FullyShardedDataParallel",
    "ZeroRedundancyOptimizer": "torch.distributed.optim's ZeroRedundancyOptimizer",
    "DeepSpeedEngine": "DeepSpeed's engine",
}
"""Classes whose state_dict is a collective, or one rank's part. Called on one rank, as a checkpoint
does, it waits for ever or ends the process by SIGABRT."""
_COLLECTIVE_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
_ONLY_A_PART = "and a checkpoint would hold only one rank's part of it"
WAY_OUT = (
    "save it with torch.distributed.checkpoint into a folder that all ranks see, as "
    "docs/recipes/sharded.md shows, and track only what is whole on each rank"
)


def refuse_partial(name: str, item: Any) -> None:
    """Refuse an object whose state is spread over ranks, by InvalidParamsError.

    It asks for no `state_dict`, which may be a collective.
    """
    # Of a module each part: its own state_dict calls theirs.
    parts = item.named_modules() if isinstance(item, torch.nn.Module) else [("", item)]
    for place, part in parts:
        for kind in type(part).__mro__:
            if kind.__name__ in _COLLECTIVE:
                what = f"{place or 'it'} is {_COLLECTIVE[kind.__name__]}"
                why = f"{what}, whose state is spread over the ranks"
                msg = f"{name!r} can't be tracked: {why}; {WAY_OUT}"
                raise InvalidParamsError(msg)
    named: Iterator[tuple[str, Any]] = iter(())
    if isinstance(item, torch.nn.Module):
        named = (
            pair for pairs in (item.named_parameters(), item.named_buffers()) for pair in pairs
        )
    elif isinstance(item, torch.optim.Optimizer):
        named = (
            (f"a parameter of group {i}", parameter)
            for i, group in enumerate(item.param_groups)
            for parameter in group["params"]
        )
    _refuse_first(name, named)


def refuse_sharded(name: str, state: Any) -> None:
    """Refuse a state that holds a sharded tensor, by InvalidParamsError with its place."""
    _refuse_first(name, _tensors(state, ""))


def state_alone(name: str, item: Any) -> Any:
    """Return an object's state, as one rank may ask for it.

    Raises:
        InvalidParamsError: its `state_dict` talks to other ranks, such as one that gathers a
            sharded model. A checkpoint calls it on one rank, where it would wait for ever.
    """
    with _NoCollectives(name):
        return state_of(item)


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at a collective, before it has begun."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        if func.namespace in _COLLECTIVE_NAMESPACES:
            call = func.__name__.partition(".")[0].rstrip("_")
            why = f"its state_dict calls the collective {call}, and a checkpoint asks only one rank"
            msg = f"{self._name!r} can't be tracked: {why}; {WAY_OUT}"
            raise InvalidParamsError(msg)
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a subclass comes first, with its own collectives
        return func(*args, **(kwargs or {}))


def _refuse_first(name: str, named: Iterator[tuple[str, Any]]) -> None:
    for place, tensor in named:
        if why := _trouble_with(tensor):
            msg = f"{name!r} can't be tracked: {place or 'it'} {why}; {WAY_OUT}"
            raise InvalidParamsError(msg)


def _trouble_with(value: Any) -> str:
    """Say why a checkpoint can't hold a tensor; nothing for one that is here as a whole."""
    if type(value).__name__ == "ShardedTensor":
        where = f"a mesh of {len(value.metadata().shards_metadata)} ranks"
        return f"is sharded over {where}, {_ONLY_A_PART}"
    # DTensor, without loading torch.distributed.tensor.
    mesh = getattr(value, "device_mesh", None)
    if mesh is None or not hasattr(value, "placements"):
        return ""
    where = f"a mesh of {mesh.size()} rank{'s' if mesh.size() > 1 else ''}"
    if mesh.size() > 1 and not all(each.is_replicate() for each in value.placements):
        return f"is sharded over {where}, {_ONLY_A_PART}"
    return f"is a DTensor on {where}, and a checkpoint holds plain tensors"


def _tensors(state: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _tensors(value, f"{place}.{key}" if place else str(key))
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from _tensors(value, f"{place}[{i}]")
    elif isinstance(state, torch.Tensor) or type(state).__name__ == "ShardedTensor":
        yield place, state
