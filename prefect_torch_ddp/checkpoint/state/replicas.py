"""What a rank holds of its tracked objects at a save, for `comparison` with the other ranks'.

A rank sums each large tensor down to a 63rd during the step, which reads it once at the speed of
memory, on the device where it is; a thread hashes the sums. A single flipped bit always changes
its sum. Copies and whole hashes would take several times as long, and a second model of memory.
"""

import functools
import platform
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from prefect_torch_ddp.checkpoint.state.own_state import OwnState
from prefect_torch_ddp.checkpoint.state.serial import NUMPYS, PYTHONS, is_dense_tensor
from prefect_torch_ddp.checkpoint.state.whole import state_alone

_NUM_ROWS = 63  # odd: the sum of a column shows where all its signs are another
_WORD_BYTES = 8
_SMALL_BYTES = 2**16
"""Up to here a tensor is hashed as it is."""
DIGEST_BYTES = 8
_FLOATS = {float, complex}


class Digests(TypedDict):
    """What a rank holds, for a comparison by equality: a `Sketch` of which nothing is on its way.

    Its keys are the fields of `Sketch`; in `digests` are those of the sums, as base64.
    """

    digests: dict[str, str]
    structures: dict[str, str]
    non_tensors: dict[str, dict[str, str]]
    unchanged: list[str]
    passes: Sequence[Sequence[int]]
    computes_on: str


@dataclass(frozen=True)
class Replicas:
    """What the ranks should have in common in addition to tracked objects."""

    models: Sequence[nn.Module] = ()
    """Those whose gradients the ranks combine."""
    passes: Sequence[tuple[int, int]] = ()
    """From which steps on they summed how many backward passes, since the checkpoint before."""


NOTHING = Replicas()


@dataclass(frozen=True)
class Tensors:
    """The tensors of a tracked object, in an order that is the same on all ranks."""

    names: tuple[str, ...]
    trained: frozenset[int] = frozenset()
    """Those that every rank has to have equal: positions in `names`."""


@dataclass
class Sketch:
    """The sums of a rank's tracked modules at a save; they may be on their way from a device."""

    tensors: dict[str, Tensors] = field(default_factory=dict)
    """By the tracked object's name, as the next ones are."""
    structures: dict[str, str] = field(default_factory=dict)
    """By the module's name, a digest of its tensors' names and its parameters' shapes."""
    layouts: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Of each tensor its shape and dtype, and how many of the bytes are its own."""
    sums: Any = ()
    """By the tracked object's name, bytes of all its tensors: a nest for `Staging.copy`."""
    non_tensors: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the tracked object's name, what `digests_of` returns of what isn't a tensor."""
    unchanged: list[str] = field(default_factory=list)
    """Those of `non_tensors` that are as they were when they were tracked."""
    passes: Sequence[tuple[int, int]] = ()
    computes_on: str = ""

    def digests(self) -> Digests:
        """Hash the sums, which have arrived on the CPU; return what JSON can hold."""
        digests = {}
        for name, layout in self.layouts.items():
            data, start, found = memoryview(self.sums[name].numpy()), 0, bytearray()
            for kind, num_bytes in layout:
                end = start + num_bytes
                hashed = blake3(data[start:end]).update(kind.encode())
                found += hashed.digest(length=DIGEST_BYTES)
                start = end
            digests[name] = b64encode(found).decode()
        return {
            "digests": digests,
            "structures": self.structures,
            "non_tensors": self.non_tensors,
            "unchanged": self.unchanged,
            "passes": self.passes,
            "computes_on": self.computes_on,
        }


@torch.no_grad()
def sketch(
    objects: Mapping[str, Any],
    common: Replicas = NOTHING,
    at_first: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    *,
    asks_states: bool = True,
) -> Sketch:
    """Sum up what is tracked, as it is now.

    Parameters of wrapped models, of tracked optimizers, and everything with gradients are replicas:
    each rank has to have the same. Others may be one rank's own, such as averaged weights that only
    rank 0 updates. Buffers are left out: forward passes change them on each rank, and rank 0's
    count. What isn't a tensor should be the same too: a resumed run gives every rank rank 0's.

    Args:
        objects: what is tracked, by name.
        common: what else the ranks should have in common.
        at_first: the `digests_of` objects' states when they were tracked.
        asks_states: also look into objects that are neither modules nor optimizers, whose
            `state_dict` may take long.
    """
    replicas = {id(each) for model in common.models for each in model.parameters()}
    replicas |= {id(each) for each in optimized(objects)}
    computes_on = _computes_on(torch.get_num_threads())
    found = Sketch(sums={}, passes=common.passes, computes_on=computes_on)
    for name, item in objects.items():
        if isinstance(item, nn.Module):
            named = list(item.named_parameters())
            trained = {
                i
                for i, (_, each) in enumerate(named)
                if id(each) in replicas or (each.is_leaf and each.grad is not None)
            }
            _sum_up(found, name, named, trained)
            names = [each for each, _ in (*named, *item.named_buffers())]
            found.structures[name] = _state_digest(
                [names, [kind for kind, _ in found.layouts[name]]]
            )
        elif isinstance(item, torch.optim.Optimizer):
            found.non_tensors[name] = {
                f"param_groups[{i}][{key!r}]": _state_digest(value)
                for i, group in enumerate(item.param_groups)
                for key, value in group.items()
                if key != "params"
            }
        elif asks_states and is_shared_state(item):
            state = state_alone(name, item)
            found.non_tensors[name] = digests_of(state)
            if found.non_tensors[name] == at_first.get(name):
                found.unchanged.append(name)
            _sum_up(found, name, list(_tensors_in(state)))
    return found


def is_shared_state(item: Any) -> bool:
    """Tell whether an object's state is compared by `digests_of` it."""
    return not isinstance(item, OwnState | nn.Module | torch.optim.Optimizer)


def digests_of(state: Any) -> dict[str, str]:
    """Return digests of each entry of a state, of what isn't a tensor in it.

    Each has two, divided by a space: the second one leaves out the values of floats. Many of
    these may well differ by rank, such as times and running losses.
    """
    entries = state.items() if isinstance(state, dict) else [("", state)]
    return {
        str(key): f"{_state_digest(value)} {_state_digest(value, has_floats=False)}"
        for key, value in entries
    }


def _sum_up(
    found: Sketch,
    name: str,
    named: Sequence[tuple[str, torch.Tensor]],
    trained: Collection[int] = (),
) -> None:
    """Add the sums of an object's tensors."""
    parts: list[torch.Tensor] = []
    layout = []
    for _, tensor in named:
        sums = _sums_of(tensor)
        kind = f"{tuple(tensor.shape) if sums else ''}{tensor.dtype}"
        layout.append((kind, sum(map(len, sums))))
        parts += sums
    found.layouts[name] = layout
    names = tuple(each for each, _ in named)
    found.tensors[name] = Tensors(names, frozenset(trained))
    # Of several devices each goes its way.
    is_together = len({part.device for part in parts}) == 1
    moved = parts if is_together else [part.cpu() for part in parts]
    found.sums[name] = torch.cat(moved) if moved else torch.empty(0, dtype=torch.uint8)


def _tensors_in(state: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield place, state
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from _tensors_in(state[key], f"{place}.{key}" if place else str(key))
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from _tensors_in(value, f"{place}[{i}]")


def _state_digest(value: Any, *, has_floats: bool = True) -> str:
    """Return a digest of what isn't a tensor, and of the tensors' shapes and dtypes.

    It is the same in every process: neither the order of a dict or set nor an address counts.
    """
    text = _spelled_out(value, has_floats=has_floats)
    return blake3(text.encode()).hexdigest(length=DIGEST_BYTES)


def _spelled_out(value: Any, *, has_floats: bool) -> str:
    kind = type(value)
    if isinstance(value, float | complex | np.floating | np.complexfloating) and not has_floats:
        return "a float"
    if kind in PYTHONS or kind in NUMPYS:
        return repr(value.item() if kind in NUMPYS else value)
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, dict):
        keys, values = (
            _spelled_each(each, has_floats=has_floats) for each in (value, value.values())
        )
        pairs = map(": ".join, zip(keys, values, strict=True))
        return f"{{{', '.join(sorted(pairs))}}}"
    if isinstance(value, list | tuple | set | frozenset):
        is_ordered = isinstance(value, list | tuple)
        each = _spelled_each(value, has_floats=has_floats)
        return f"[{', '.join(each)}]" if is_ordered else f"set {sorted(each)}"
    if isinstance(value, bytes | bytearray):
        value = blake3(value).hexdigest()
    # Of others a text may show an address, or the rank's own device.
    is_text = isinstance(value, float | str | torch.dtype)
    return f"{kind.__qualname__} {value!r}" if is_text else kind.__qualname__


def _spelled_each(values: Collection[Any], *, has_floats: bool) -> list[str]:
    """Spell out the entries of a container: many plain ones, such as an order, in one pass."""
    if PYTHONS.issuperset(map(type, values)):
        if has_floats:
            return list(map(repr, values))
        return ["a float" if type(each) in _FLOATS else repr(each) for each in values]
    return [
        _spelled_out(each, has_floats=has_floats)
        if type(each) in PYTHONS or type(each) in NUMPYS
        else _state_digest(each, has_floats=has_floats)
        for each in values
    ]


def optimized(objects: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the parameters of all tracked optimizers."""
    return [
        parameter
        for item in objects.values()
        if isinstance(item, torch.optim.Optimizer)
        for group in item.param_groups
        for parameter in group["params"]
    ]


def _sums_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return bytes that change with any bit of a tensor; none for what has no plain values yet."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta:
        return []
    if not is_dense_tensor(tensor):
        # A subclass's or sparse memory may be none, or mean something else.
        return []
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.storage_offset() * flat.itemsize % _WORD_BYTES:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    num_words = len(data) // (_WORD_BYTES * _NUM_ROWS) if len(data) > _SMALL_BYTES else 0
    num_summed = num_words * _NUM_ROWS * _WORD_BYTES
    if not num_summed:
        return [data]
    rows = data[:num_summed].view(torch.int64).view(_NUM_ROWS, num_words)
    return [rows.sum(0).view(torch.uint8), data[num_summed:]]


@functools.cache
def _computes_on(num_threads: int) -> str:
    """Say what a rank computes on: with another processor or number of threads last bits differ."""
    processor = platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        names = (line.partition(":")[2].strip() for line in text.splitlines())
        lines = zip(text.splitlines(), names, strict=True)
        processor = next(name for line, name in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    parts = [processor, torch.backends.cpu.get_cpu_capability(), f"{num_threads} threads"]
    parts.append(f"torch {torch.__version__}")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)
