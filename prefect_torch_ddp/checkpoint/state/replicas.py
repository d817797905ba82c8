"""Whether all ranks hold the same: digests of tracked objects, taken at a save and compared.

A rank sums each large tensor down to a 63rd during the step, which reads it once at the speed of
memory, on the device where it is; a thread hashes the sums. A single flipped bit always changes
its sum. Copies and whole hashes would take several times as long, and a second model of memory.
The module is long since what is taken on a rank and what rank 0 compares must fit each other.
"""

import functools
import logging
import platform
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from prefect_torch_ddp.checkpoint.state.own_state import OwnState
from prefect_torch_ddp.checkpoint.state.serial import NUMPYS, PYTHONS, is_plain
from prefect_torch_ddp.checkpoint.state.whole import state_alone
from prefect_torch_ddp.errors import InvalidParamsError, ReplicasDifferError

logger = logging.getLogger(__name__)

_NUM_ROWS = 63  # odd: the sum of a column shows where all its signs are another
_WORD_BYTES = 8
_SMALL_BYTES = 2**16
"""Up to here a tensor is hashed as it is."""
_DIGEST_BYTES = 8
_MOST_SHOWN = 8
_FLOATS = {float, complex}

Report = Mapping[str, Any]
"""What `Sketch.report` returned on a rank."""


@dataclass(frozen=True)
class Replicas:
    """What the ranks should have in common beside what is tracked."""

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
    plain: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the tracked object's name, what `digests_of` returns of what isn't a tensor."""
    unchanged: list[str] = field(default_factory=list)
    """Those of `plain` that are as they were when they were tracked."""
    passes: Sequence[tuple[int, int]] = ()
    computes_on: str = ""

    def report(self) -> Report:
        """Hash the sums, which have arrived on the CPU; return what JSON can hold."""
        digests = {}
        for name, layout in self.layouts.items():
            data, start, found = memoryview(self.sums[name].numpy()), 0, bytearray()
            for kind, num_bytes in layout:
                end = start + num_bytes
                hashed = blake3(data[start:end]).update(kind.encode())
                found += hashed.digest(length=_DIGEST_BYTES)
                start = end
            digests[name] = b64encode(found).decode()
        report = {"digests": digests, "structures": self.structures, "plain": self.plain}
        report |= {"unchanged": self.unchanged, "passes": self.passes}
        return {**report, "computes_on": self.computes_on}


@torch.no_grad()
def sketch(
    objects: Mapping[str, Any],
    common: Replicas = NOTHING,
    at_first: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    *,
    asks_states: bool = True,
) -> Sketch:
    """Sum up what is tracked, as it is now.

    Parameters of wrapped models, of tracked optimizers, and all that have gradients are replicas:
    each rank has to have the same. Others may be one rank's own, such as averaged weights that only
    rank 0 updates. Buffers are left out: forward passes change them on each rank, and rank 0's
    count. What isn't a tensor should be the same too: a resumed run gives every rank rank 0's.

    Args:
        objects: what is tracked, by name.
        common: what the ranks should have in common beside that.
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
            found.structures[name] = _digest_of([names, [kind for kind, _ in found.layouts[name]]])
        elif isinstance(item, torch.optim.Optimizer):
            found.plain[name] = {
                f"param_groups[{i}][{key!r}]": _digest_of(value)
                for i, group in enumerate(item.param_groups)
                for key, value in group.items()
                if key != "params"
            }
        elif asks_states and is_shared_state(item):
            state = state_alone(name, item)
            found.plain[name] = digests_of(state)
            if found.plain[name] == at_first.get(name):
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
        str(key): f"{_digest_of(value)} {_digest_of(value, has_floats=False)}"
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


def _digest_of(value: Any, *, has_floats: bool = True) -> str:
    """Return a digest of what isn't a tensor, and of the tensors' shapes and dtypes.

    It is the same in every process: neither the order of a dict or set nor an address counts.
    """
    text = _spelled_out(value, has_floats=has_floats)
    return blake3(text.encode()).hexdigest(length=_DIGEST_BYTES)


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
        else _digest_of(each, has_floats=has_floats)
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
    if not is_plain(tensor):
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


class Comparison:
    """Compares what the ranks report at each save of a training, on rank 0."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def check(self, sketched: Sketch, reports: Sequence[Report], *, is_first: bool = True) -> None:
        """Refuse what differs and mustn't; log once for each object what may differ.

        Args:
            sketched: rank 0's.
            reports: of all ranks.
            is_first: the training has no checkpoint yet: what is only suspicious is refused, since
                nothing is lost by it. Later it is warned of.

        Raises:
            InvalidParamsError: a module has other tensors on some ranks; or a state differs.
            ReplicasDifferError: a replica differs, between ranks that compute on the same; or the
                ranks summed different numbers of passes in a step.
        """
        _check_passes([report["passes"] for report in reports])
        notes = check_replicas(sketched.tensors, reports)
        notes |= _check_plain(sketched, reports, is_first=is_first)
        for name, note in notes.items():
            if name not in self._noted:
                self._noted.add(name)
                logger.warning(note)


def _check_passes(passes: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise ReplicasDifferError if ranks summed different numbers of passes in a step."""
    for step in sorted({first for each in passes for first, _ in each}):
        # Of each rank the newest change up to this step.
        nums = [next((num for first, num in reversed(each) if first <= step), 0) for each in passes]
        odd = _odd_ones(dict(enumerate(nums)))
        if odd:
            usual = next(num for rank, num in enumerate(nums) if rank not in odd)
            msg = (
                f"the ranks summed different numbers of backward passes in step {step}: "
                f"{spelled(odd)} {nums[odd[0]]}, the others {usual}. From there on gradients of "
                "different batches were added up. Make the same backward passes in every step on "
                "every rank; if one rank has to leave a batch out, such as for a loss that isn't "
                "finite, let all ranks leave it out, by an all_reduce of a flag"
            )
            raise ReplicasDifferError(msg)


def check_replicas(tensors: Mapping[str, Tensors], reports: Sequence[Report]) -> dict[str, str]:
    """Compare the reports of all ranks; return, by object, what differs and may do so."""
    notes = {}
    for name, own in tensors.items():
        structures = [report["structures"].get(name) for report in reports]
        for rank, structure in enumerate(structures):
            if structure != structures[0]:
                msg = (
                    f"the tracked object {name!r} differs between the ranks: its tensors on rank "
                    f"{rank} have other names or shapes than on rank 0; build it the same way on "
                    "every rank"
                )
                raise InvalidParamsError(msg)
        of_ranks = [_split(report["digests"].get(name, "")) for report in reports]
        if any(len(each) != len(own.names) for each in of_ranks):
            continue  # no module: what isn't a tensor differs as well
        if all(digests == of_ranks[0] for digests in of_ranks):
            continue
        places = [report["computes_on"] for report in reports]
        _refuse_drifted(name, own, of_ranks, places)
        differing = [i for i in range(len(own.names)) if len({each[i] for each in of_ranks}) > 1]
        notes[name] = _note(name, own, of_ranks, differing)
    return notes


def _check_plain(sketched: Sketch, reports: Sequence[Report], *, is_first: bool) -> dict[str, str]:
    """Compare what isn't a tensor; return what is suspicious and not refused, by object."""
    notes = {}
    for name, own in sketched.plain.items():
        others = [report["plain"].get(name, {}) for report in reports]
        # What only rank 0 changes, such as a history of what it evaluates, is its own.
        differing = [
            rank
            for rank, other in enumerate(others)
            if other != own and name not in reports[rank]["unchanged"]
        ]
        if not differing:
            continue
        rank, is_proved = differing[0], False
        for each in differing:
            # Of an optimizer floats count as well.
            pairs = [(own.get(key, ""), others[each].get(key, "")) for key in [*own, *others[each]]]
            is_same_place = reports[each]["computes_on"] == reports[0]["computes_on"]
            if is_same_place and any(one.split()[-1:] != two.split()[-1:] for one, two in pairs):
                rank, is_proved = each, True
                break
        other = others[rank]
        key = next(key for key in [*own, *other] if own.get(key) != other.get(key))
        what = (
            f"the state of the tracked object {name!r} differs between the ranks: {key or 'it'} on "
            f"rank {rank} isn't as on rank 0, and a resumed run gives every rank rank 0's. Make "
            "and update it in the same way on every rank; or, if each rank's state is its own, "
            f"call ctx.track_each({name}=...) instead of ctx.track"
        )
        if is_proved and is_first:
            raise InvalidParamsError(what)
        notes[name] = what
    return notes


def _refuse_drifted(
    name: str, own: Tensors, of_ranks: Sequence[Sequence[bytes]], places: Sequence[str]
) -> None:
    """Raise ReplicasDifferError where ranks that compute on the same have other weights."""
    odd: dict[int, list[int]] = {}  # ranks by the tensor
    for i in sorted(own.trained):
        for place in dict.fromkeys(places):
            ranks = [rank for rank, there in enumerate(places) if there == place]
            odd.setdefault(i, []).extend(_odd_ones({r: of_ranks[r][i] for r in ranks}))
    odd = {i: sorted(ranks) for i, ranks in odd.items() if ranks}
    if not odd:
        return
    first = next(iter(odd))
    others = f" (and {len(odd) - 1} more of its tensors)" if len(odd) > 1 else ""
    msg = (
        f"the replicas of {name!r} have drifted apart: {own.names[first]}{others} differs on "
        f"{spelled(odd[first])} from the others. Every rank has to make the same updates: "
        "call what ctx.wrap returned, not the model given to it and not .module; make one backward "
        "pass for each forward pass, and the same steps on every rank; wrap a model again after "
        "other parameters are to be trained. If each rank trains a model of its own on purpose, "
        f"call ctx.track_each({name}=...). If none of that is so, a memory or a device may have "
        "failed. checkpoint.compare_replicas=False turns this check off"
    )
    raise ReplicasDifferError(msg)


def _odd_ones(digests: Mapping[int, bytes | int]) -> list[int]:
    """Return the ranks that most of the others don't agree with; of two halves, not rank 0's."""
    groups: dict[bytes | int, list[int]] = {}
    for rank, digest in digests.items():
        groups.setdefault(digest, []).append(rank)
    most = max(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return [rank for rank in digests if rank not in most]


def _note(
    name: str, own: Tensors, of_ranks: Sequence[Sequence[bytes]], differing: Sequence[int]
) -> str:
    """Say what differs and need not be a fault."""
    first = next((i for i in differing if i in own.trained), differing[0])
    ranks = [rank for rank, each in enumerate(of_ranks) if each[first] != of_ranks[0][first]]
    what = f"{name!r} isn't the same on all ranks: {own.names[first]} differs on {spelled(ranks)}"
    if first in own.trained:
        return (
            f"{what} from rank 0, which computes on another processor, device or number of "
            "threads. If only the last bits differ, that is why; if not, the replicas have "
            "drifted apart"
        )
    return (
        f"{what} from rank 0, whose state every rank gets when the run resumes; "
        f"ctx.track_each({name}=...) keeps each rank's"
    )


def spelled(ranks: Sequence[int]) -> str:
    """Name some ranks."""
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    more = ", ..." if len(ranks) > _MOST_SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _split(text: str) -> list[bytes]:
    data = b64decode(text)
    return [data[i : i + _DIGEST_BYTES] for i in range(0, len(data), _DIGEST_BYTES)]
