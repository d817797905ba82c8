"""From states to bytes and back: staging, serialising, and loading that never runs code.

Also the state of a rank's random generators: Python's, NumPy's, torch's and CUDA's.
"""

import io
import mmap
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_Layout = tuple[torch.Size, torch.dtype, tuple[int, ...], bool]
_View = tuple[int, torch.device, torch.dtype, torch.Size, tuple[int, ...], bool, bool]

PYTHONS = {type(None), bool, int, float, complex, str}
RATES = {"lr", "momentum", "betas", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""Options of an optimizer's groups that torch's schedulers set."""
NUMERIC = torch.Tensor | np.ndarray | int | float
"""Of options: what is compared by its values."""
NUMPYS = {np.dtype(code).type for code in "?bBhHiIlLqQefdFDSU"}
"""NumPy's numbers and texts with an equal of Python's: neither its long doubles nor its dates."""


def to_bytes(state: Any) -> bytes:
    """Serialise a state; plain `torch.load(..., weights_only=True)` reads it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the state, its tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def from_file(file: BinaryIO) -> Any:
    """Return the state of an open file, its tensors mapped: they are read when they are used."""
    # By the descriptor, since another file may have the name by now.
    path = f"/proc/self/fd/{file.fileno()}"
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


class Serializer:
    """Serialises one state at a time into memory that it keeps: fresh memory costs most.

    It begins a page, from which a file can be written past the kernel's cache.
    """

    def __init__(self) -> None:
        self._memory = _new_page()
        self._end = 0

    def to_view(self, state: Any) -> memoryview:
        """Return what `torch.load` reads; drop it before the next call, or lose the memory."""
        try:
            self._memory.resize(len(self._memory))
        except BufferError:  # somebody still holds the last view, such as a traceback
            self._memory = _new_page()
        self._end = 0
        # Zip's checksums take two thirds of the time; torch compares none when it loads.
        has_checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(compute_crc32=False)
        try:
            torch.save(state, cast("BinaryIO", self))
        finally:
            torch.serialization.set_crc32_options(has_checksums)
        return memoryview(self._memory)[: self._end].toreadonly()

    def write(self, data: bytes | memoryview) -> int:
        """Take the next bytes from torch."""
        end = self._end + len(data)
        if end > len(self._memory):
            self._memory.resize(max(end, 2 * len(self._memory)))
        self._memory[self._end : end] = data
        self._end = end
        return len(data)

    def flush(self) -> None:
        """Do nothing: torch calls it."""


def _new_page() -> mmap.mmap:
    return mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Staging:
    """Copies states to the CPU during a step, so that the slow part happens during the next one.

    The buffers of the previous copy are used again, so that one must not be needed any more.
    """

    def __init__(self) -> None:
        self._idle: dict[_Layout, list[torch.Tensor]] = {}
        self._used: list[tuple[_Layout, torch.Tensor]] = []
        self._copied: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Take all buffers back; those that the previous copy didn't need are freed."""
        self._idle = {}
        for layout, buffer in self._used:
            self._idle.setdefault(layout, []).append(buffer)
        self._used = []

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Return the state on the CPU; copies from a GPU may be under way until `wait`."""
        copies: dict[_View, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if not is_dense_tensor(tensor):
                return tensor.detach().to("cpu", copy=True)
            # Tied weights are stored once, as torch.save does.
            view = _view_of(tensor)
            if tensor.numel() == 0 or view not in copies:
                buffer = self._buffer_for(tensor)
                copies[view] = buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            return copies[view]

        result = map_tensors(state, copied)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied.append(event)
        return result

    def wait(self) -> None:
        """Wait until all copies have arrived."""
        while self._copied:
            self._copied.pop().synchronize()

    def _buffer_for(self, tensor: torch.Tensor) -> torch.Tensor:
        layout = (tensor.shape, tensor.dtype, tensor.stride(), tensor.is_cuda)
        if idle := self._idle.get(layout):
            buffer = idle.pop()
        else:
            buffer = torch.empty_like(
                tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda
            )
        self._used.append((layout, buffer))
        return buffer.detach()


def _view_of(tensor: torch.Tensor) -> _View:
    place = tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
    # A view may be conjugated or negated only when it is read.
    return *place, tensor.is_conj(), tensor.is_neg()


def is_dense_tensor(value: Any) -> bool:
    """Tell whether a value is a dense tensor of no subclass."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided


def has_buffers(item: Any) -> bool:
    """Tell whether an object is a module with buffers, such as BatchNorm's statistics."""
    return hasattr(item, "buffers") and any(True for _ in item.buffers())


def state_of(item: Any) -> Any:
    """Return the state of an object; what a module holds in wrappers is named as without them."""
    state = item.state_dict()
    for prefix, inner in reversed(_wrappers(item)):
        state = _renamed(state, f"{prefix}{inner}", prefix)
    return state


def load_state(item: Any, state: Any) -> None:
    """Load what `state_of` returned, on any number of ranks, compiled or not.

    Raises:
        ValueError: the state is another kind of optimizer's, or of one with other groups.
    """
    for prefix, inner in _wrappers(item):
        state = _renamed(state, prefix, f"{prefix}{inner}")
    before = group_options(item)
    _refuse_other_groups(group_sizes(item), state)
    own = getattr(item, "defaults", None) or {}
    try:
        item.load_state_dict(state)
    except KeyError:  # torch looks in each parameter's state for what another kind doesn't keep
        theirs = state.get("param_groups", ()) if isinstance(state, dict) else ()
        for i, (had, has) in enumerate(zip(before, theirs, strict=False)):
            _refuse_another_kind(i, own, own | had, has)
        raise
    # What torch fills in for an older version's state is there again by now.
    for i, (had, has) in enumerate(zip(before, _groups(item), strict=False)):
        _refuse_another_kind(i, own, had, has)
        # Of a new scheduler, or the user's own.
        has.update({name: had[name] for name in had.keys() - has.keys()})


def _refuse_another_kind(
    i: int, own: Mapping[str, Any], had: Mapping[str, Any], has: Mapping[str, Any]
) -> None:
    """Refuse a group that lacks an option of the optimizer's kind.

    Those are its defaults. If its groups have none, as those of some Muons, a group of another kind
    is one that also has options that the optimizer's doesn't.
    """
    lacking = had.keys() - has.keys()
    if own.keys() & had.keys():  # torch adds one to `defaults` that such groups haven't
        lacking &= own.keys()
    elif not has.keys() - had.keys() - {"params", "param_names"}:
        return
    if lacking:
        msg = (
            f"it is another kind of optimizer's: group {i} has no {', '.join(sorted(lacking))}; "
            "make the same kind as in the run that saved it, or track it under another name, which "
            "starts it from the beginning"
        )
        raise ValueError(msg)


def _refuse_other_groups(own: list[int], state: Any) -> None:
    theirs = _group_sizes(state.get("param_groups")) if isinstance(state, dict) else []
    if not own or not theirs or theirs == own:
        return
    if len(theirs) != len(own):
        what = f"it has {len(theirs)} parameter groups and the optimizer here {len(own)}: groups"
    else:
        i = next(i for i, num in enumerate(own) if num != theirs[i])
        what = f"its group {i} has {theirs[i]} parameters and the optimizer's here {own[i]}: those"
    msg = (
        f"{what} that are added during the training have to be there before ctx.track. Make all "
        "of them at the start, with lr=0 for those that come later, or track the optimizer under "
        "another name, which starts it from the beginning"
    )
    raise ValueError(msg)


def group_sizes(item: Any) -> list[int]:
    """Return how many parameters each group of an optimizer has; empty for anything else."""
    return _group_sizes(getattr(item, "param_groups", None))


def _group_sizes(groups: Any) -> list[int]:
    is_as_usual = isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
    return [len(group["params"]) for group in groups] if is_as_usual else []


def group_options(item: Any) -> list[dict[str, Any]]:
    """Return copies of the options of an optimizer's groups; empty for anything else."""
    return [
        {name: deepcopy(value) for name, value in group.items() if name != "params"}
        for group in _groups(item)
    ]


def changed_options(item: Any, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what differs from `group_options` in an optimizer's groups, for each group."""
    return [
        {
            name: value
            for name, value in now.items()
            if name not in had or not _is_same(value, had[name])
        }
        for now, had in zip(group_options(item), options, strict=False)
    ]


def put_options(item: Any, options: list[dict[str, Any]]) -> list[str]:
    """Set the options of each group of an optimizer; return the names that differed."""
    changed = set()
    for group, had in zip(_groups(item), options, strict=False):
        for name, value in had.items():
            if name in group and _is_same(group[name], value):
                continue
            changed.add(name)
            # A compiled step holds this tensor.
            if isinstance(group.get(name), torch.Tensor) and isinstance(value, NUMERIC):
                group[name].copy_(torch.as_tensor(value))
            else:
                group[name] = value
    return sorted(changed)


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, torch.Tensor | np.ndarray) or isinstance(other, torch.Tensor | np.ndarray):
        if not all(isinstance(each, NUMERIC) for each in (value, other)):
            return False
        return torch.equal(*(torch.as_tensor(each, device="cpu") for each in (value, other)))
    return bool(value == other)


def _groups(item: Any) -> list[dict[str, Any]]:
    groups = getattr(item, "param_groups", None)
    is_as_usual = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    return groups if groups and is_as_usual else []


def _wrappers(item: Any) -> list[tuple[str, str]]:
    """Return where a module holds others in DDP or compiled, such as in AveragedModel.

    Each is the prefix of its names, and what the wrapper adds to it; outer ones first.
    """
    if not isinstance(item, nn.Module):
        return []
    found = []
    for name, module in item.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        if isinstance(module, DistributedDataParallel):
            found.append((prefix, "module."))
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):  # torch.compile's
            found.append((prefix, "_orig_mod."))
    return found


def _renamed(state: Any, old: str, new: str) -> Any:
    """Copy a module's state and its _metadata, with another prefix for the names that have it."""
    if not isinstance(state, dict):
        return state

    def rename(name: Any) -> Any:
        return new + name[len(old) :] if isinstance(name, str) and name.startswith(old) else name

    result = copy(state)
    result.clear()
    result.update((rename(name), value) for name, value in state.items())
    if (metadata := getattr(state, "_metadata", None)) is not None:
        renamed = OrderedDict((rename(f"{name}.")[:-1], about) for name, about in metadata.items())
        vars(result)["_metadata"] = renamed
    return result


def map_tensors(state: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a nest of dicts, lists and tuples, each tensor replaced and the rest copied deeply.

    NumPy's numbers and texts become Python's: `torch.load(weights_only=True)` takes no others.
    """
    kind = type(state)
    if kind in PYTHONS:
        return state
    if kind in NUMPYS:
        return state.item()
    if isinstance(state, torch.Tensor):
        return replace(state)
    if isinstance(state, dict):
        result = copy(state)  # keeps the class and its attributes, such as a module's _metadata
        result.clear()
        for key, value in state.items():
            result[map_tensors(key, replace)] = map_tensors(value, replace)
        return result
    if isinstance(state, list | tuple) or kind in (set, frozenset):
        values = [map_tensors(value, replace) for value in state]
        return kind(*values) if hasattr(state, "_fields") else kind(values)
    return deepcopy(state)


def capture_generators() -> dict[str, Any]:
    """Return the state of all global generators, as tensors and plain values."""
    # The global one is what user code draws from.
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy["state"] |= {"key": numpy["state"]["key"].tolist()}
    state = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Only this rank's device: asking for the others would make a context on each.
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Put the generators back; a device that either side lacks is skipped."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
