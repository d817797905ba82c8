"""Whether all ranks hold the same model: digests of its tensors, taken at a save and compared.

A rank sums each large tensor down to a 63rd during the step, which reads it once at the speed of
memory, on the device where it is; a thread hashes the sums. A single flipped bit always changes
its sum. Copies and whole hashes would take several times as long, and a second model of memory.
"""

import functools
import logging
import platform
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from prefect_torch_ddp.checkpoint.serial import is_plain
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
    """The tensors of a tracked module, in an order that is the same on all ranks."""

    names: tuple[str, ...]
    trained: frozenset[int] = frozenset()
    """Those that every rank has to have equal: positions in `names`."""


@dataclass
class Sketch:
    """The sums of a rank's tracked modules at a save; they may be on their way from a device."""

    tensors: dict[str, Tensors] = field(default_factory=dict)
    """By the tracked object's name."""
    layouts: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Of each tensor its shape and dtype, and how many of the bytes are its own."""
    sums: Any = ()
    """By the tracked object's name, the bytes of all its tensors: a nest for `Staging.copy`."""
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
        return {"digests": digests, "computes_on": self.computes_on}


@torch.no_grad()
def sketch(objects: Mapping[str, Any], wrapped: Collection[nn.Module] = ()) -> Sketch:
    """Sum up the tracked modules, as they are now.

    Args:
        objects: what is tracked, by name.
        wrapped: the models whose gradients the ranks combine.

    Parameters of these, of tracked optimizers, and all that have gradients are replicas: each rank
    has to have the same. Others may be one rank's own, such as averaged weights that only rank 0
    updates. So may buffers: rank 0's count, and a forward pass changes others.
    """
    replicas = {id(each) for model in wrapped for each in model.parameters()}
    replicas |= {id(each) for each in optimized(objects)}
    found = Sketch(sums={}, computes_on=_computes_on(torch.get_num_threads()))
    for name, item in objects.items():
        if not isinstance(item, nn.Module):
            continue
        named: list[tuple[str, torch.Tensor]] = [*item.named_parameters()]
        trained = {
            i
            for i, (_, each) in enumerate(named)
            if id(each) in replicas or (each.is_leaf and each.grad is not None)
        }
        named += item.named_buffers()
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
        device = parts[0].device if parts else torch.device("cpu")
        same = all(part.device == device for part in parts)
        moved = parts if same else [part.cpu() for part in parts]
        found.sums[name] = torch.cat(moved) if moved else torch.empty(0, dtype=torch.uint8)
    return found


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
        for name, note in check_replicas(sketched.tensors, reports).items():
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
    others = f" (as do {len(odd) - 1} more of its tensors)" if len(odd) > 1 else ""
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
    return f"{what} from rank 0, whose state every rank gets when the run resumes"


def spelled(ranks: Sequence[int]) -> str:
    """Name some ranks."""
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    more = ", ..." if len(ranks) > _MOST_SHOWN else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _split(text: str) -> list[bytes]:
    data = b64decode(text)
    return [data[i : i + _DIGEST_BYTES] for i in range(0, len(data), _DIGEST_BYTES)]
