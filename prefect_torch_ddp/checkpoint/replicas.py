"""Whether all ranks hold the same: digests of tracked objects, taken at a save and compared.

A rank sums each large tensor down to a 63rd during the step, which reads it once at the speed of
memory, on the device where it is; a thread hashes the sums. A single flipped bit always changes
its sum. Copies and whole hashes would take several times as long, and a second model of memory.
"""

import functools
import logging
import platform
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from prefect_torch_ddp.checkpoint.serial import NUMPYS, PYTHONS, is_plain
from prefect_torch_ddp.checkpoint.shards import OwnState
from prefect_torch_ddp.checkpoint.whole import state_alone
from prefect_torch_ddp.errors import InvalidParamsError, ReplicasDifferError

logger = logging.getLogger(__name__)

_NUM_ROWS = 63  # odd: the sum of a column shows where all its signs are another
_WORD_BYTES = 8
_SMALL_BYTES = 2**16
"""Up to here a tensor is hashed as it is."""
_DIGEST_BYTES = 8
_MOST_SHOWN = 8

Report = Mapping[str, Any]
"""What `Sketch.report` returned on a rank."""


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
    layouts: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Of each tensor its shape and dtype, and how many of the bytes are its own."""
    sums: Any = ()
    """By the tracked object's name, bytes of all its tensors: a nest for `Staging.copy`."""
    plain: dict[str, dict[str, str]] = field(default_factory=dict)
    """By the tracked object's name, digests of what isn't a tensor, for each entry of its state."""
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
        return {"digests": digests, "plain": self.plain, "computes_on": self.computes_on}


@torch.no_grad()
def sketch(
    objects: Mapping[str, Any], wrapped: Collection[nn.Module] = (), *, asks_states: bool = True
) -> Sketch:
    """Sum up what is tracked, as it is now.

    Parameters of wrapped models, of tracked optimizers, and all that have gradients are replicas:
    each rank has to have the same. Others may be one rank's own, such as averaged weights that only
    rank 0 updates. So may buffers: rank 0's count, and a forward pass changes others. What isn't a
    tensor has to be the same too: a resumed run gives every rank rank 0's.

    Args:
        objects: what is tracked, by name.
        wrapped: the models whose gradients the ranks combine.
        asks_states: also look into objects that are neither modules nor optimizers, whose
            `state_dict` may take long.
    """
    replicas = {id(each) for model in wrapped for each in model.parameters()}
    replicas |= {id(each) for each in optimized(objects)}
    found = Sketch(sums={}, computes_on=_computes_on(torch.get_num_threads()))
    for name, item in objects.items():
        if isinstance(item, OwnState):
            continue
        if isinstance(item, nn.Module):
            named: list[tuple[str, torch.Tensor]] = [*item.named_parameters()]
            trained = {
                i
                for i, (_, each) in enumerate(named)
                if id(each) in replicas or (each.is_leaf and each.grad is not None)
            }
            _sum_up(found, name, [*named, *item.named_buffers()], trained)
        elif isinstance(item, torch.optim.Optimizer):
            groups = enumerate(item.param_groups)
            found.plain[name] = {
                f"param_groups[{i}][{key!r}]": _digest_of(value)
                for i, group in groups
                for key, value in group.items()
                if key != "params"
            }
        elif asks_states:
            state = state_alone(name, item)
            entries = state.items() if isinstance(state, dict) else [("", state)]
            found.plain[name] = {str(key): _digest_of(value) for key, value in entries}
            _sum_up(found, name, list(_tensors_in(state)))
    return found


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
    found.tensors[name] = Tensors(tuple(each for each, _ in named), frozenset(trained))
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


def _digest_of(value: Any) -> str:
    """Return a digest of what isn't a tensor, and of the tensors' shapes and dtypes.

    It is the same in every process: neither the order of a dict or set nor an address counts.
    """
    return blake3(_spelled_out(value).encode()).hexdigest(length=_DIGEST_BYTES)


def _spelled_out(value: Any) -> str:
    kind = type(value)
    if kind in PYTHONS or kind in NUMPYS:
        return repr(value.item() if kind in NUMPYS else value)
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, dict):
        pairs = (f"{_digest_of(key)}: {_digest_of(each)}" for key, each in value.items())
        return f"{{{', '.join(sorted(pairs))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_digest_of, value))}]"
    if isinstance(value, set | frozenset):
        return f"set {sorted(map(_digest_of, value))}"
    # Of others a text may show an address, or the rank's own device.
    is_text = isinstance(value, float | str | bytes | bytearray | torch.dtype)
    return f"{kind.__qualname__} {value!r}" if is_text else kind.__qualname__


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
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


class Comparison:
    """Compares what the ranks report at each save of a training, on rank 0."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def check(self, sketched: Sketch, reports: Sequence[Report]) -> None:
        """Refuse what differs and mustn't; log once for each object what may differ.

        Args:
            sketched: rank 0's.
            reports: of all ranks.

        Raises:
            InvalidParamsError: a module has other tensors on some ranks.
            ReplicasDifferError: a replica differs, between ranks that compute on the same.
        """
        notes = _check_plain(sketched.plain, reports) | check_replicas(sketched.tensors, reports)
        for name, note in notes.items():
            if name not in self._noted:
                self._noted.add(name)
                logger.warning(note)


def check_replicas(tensors: Mapping[str, Tensors], reports: Sequence[Report]) -> dict[str, str]:
    """Compare the reports of all ranks; return, by object, what differs and may do so."""
    notes = {}
    for name, own in tensors.items():
        of_ranks = [_split(report["digests"].get(name, "")) for report in reports]
        for rank, digests in enumerate(of_ranks):
            if len(digests) != len(own.names):
                msg = (
                    f"the tracked object {name!r} differs between the ranks: it has "
                    f"{len(own.names)} tensors on rank 0 and {len(digests)} on rank {rank}; build "
                    "it the same way on every rank"
                )
                raise InvalidParamsError(msg)
        if all(digests == of_ranks[0] for digests in of_ranks):
            continue
        places = [report["computes_on"] for report in reports]
        _refuse_drifted(name, own, of_ranks, places)
        differing = [i for i in range(len(own.names)) if len({each[i] for each in of_ranks}) > 1]
        notes[name] = _note(name, own, of_ranks, differing)
    return notes


def _check_plain(
    plain: Mapping[str, Mapping[str, str]], reports: Sequence[Report]
) -> dict[str, str]:
    """Compare what isn't a tensor; return what differs between unlike processors, by object."""
    notes = {}
    for name, own in plain.items():
        for rank, report in enumerate(reports):
            other = report["plain"].get(name, {})
            if own == other:
                continue
            key = next(key for key in [*own, *other] if own.get(key) != other.get(key))
            what = (
                f"the state of the tracked object {name!r} differs between the ranks: "
                f"{key or 'it'} on rank {rank} isn't as on rank 0, and a resumed run gives every "
                "rank rank 0's. Make and update it in the same way on every rank; or, if each "
                f"rank's state is its own, call ctx.track_each({name}=...) instead of ctx.track"
            )
            if report["computes_on"] == reports[0]["computes_on"]:
                raise InvalidParamsError(what)
            notes[name] = what
            break
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
        "other parameters are to be trained. If all that is so, a memory or a device may have "
        "failed. checkpoint.compare_replicas=False turns this check off"
    )
    raise ReplicasDifferError(msg)


def _odd_ones(digests: Mapping[int, bytes]) -> list[int]:
    """Return the ranks that most of the others don't agree with; of two halves, not rank 0's."""
    groups: dict[bytes, list[int]] = {}
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
