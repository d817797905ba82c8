"""Whether all ranks hold the same: their digests at a save, compared by rank 0."""

import logging
from base64 import b64decode
from collections.abc import Mapping, Sequence

from prefect_torch_ddp.checkpoint.state.replicas import DIGEST_BYTES, Digests, Sketch, Tensors
from prefect_torch_ddp.errors import InvalidParamsError, ReplicasDifferError

logger = logging.getLogger(__name__)

_MOST_SHOWN = 8


class Comparison:
    """Compares the ranks' digests at each save of a training, on rank 0."""

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def check(self, sketched: Sketch, digests: Sequence[Digests], *, is_first: bool = True) -> None:
        """Refuse what differs and mustn't; log once for each object what may differ.

        Args:
            sketched: rank 0's.
            digests: of all ranks.
            is_first: the training has no checkpoint yet: what is only suspicious is refused, since
                nothing is lost by it. Later it is warned of.

        Raises:
            InvalidParamsError: a module has other tensors on some ranks; or a state differs.
            ReplicasDifferError: a replica differs, between ranks that compute on the same; or the
                ranks summed different numbers of passes in a step.
        """
        _check_passes([each["passes"] for each in digests])
        notes = check_replicas(sketched.tensors, digests)
        notes |= _check_non_tensors(sketched, digests, is_first=is_first)
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


def check_replicas(tensors: Mapping[str, Tensors], digests: Sequence[Digests]) -> dict[str, str]:
    """Compare the digests of all ranks; return, by object, what differs and may do so."""
    notes = {}
    for name, own in tensors.items():
        structures = [each["structures"].get(name) for each in digests]
        for rank, structure in enumerate(structures):
            if structure != structures[0]:
                msg = (
                    f"the tracked object {name!r} differs between the ranks: its tensors on rank "
                    f"{rank} have other names or shapes than on rank 0; build it the same way on "
                    "every rank"
                )
                raise InvalidParamsError(msg)
        of_ranks = [_split(each["digests"].get(name, "")) for each in digests]
        if any(len(each) != len(own.names) for each in of_ranks):
            continue  # no module: what isn't a tensor differs as well
        if all(found == of_ranks[0] for found in of_ranks):
            continue
        devices = [each["computes_on"] for each in digests]
        _refuse_drifted(name, own, of_ranks, devices)
        differing = [i for i in range(len(own.names)) if len({each[i] for each in of_ranks}) > 1]
        notes[name] = _note(name, own, of_ranks, differing)
    return notes


def _check_non_tensors(
    sketched: Sketch, digests: Sequence[Digests], *, is_first: bool
) -> dict[str, str]:
    """Compare what isn't a tensor; return what is suspicious and not refused, by object."""
    notes = {}
    for name, own in sketched.non_tensors.items():
        others = [each["non_tensors"].get(name, {}) for each in digests]
        # What only rank 0 changes, such as a history of what it evaluates, is its own.
        differing = [
            rank
            for rank, other in enumerate(others)
            if other != own and name not in digests[rank]["unchanged"]
        ]
        if not differing:
            continue
        rank, is_proved = differing[0], False
        for each in differing:
            # Of an optimizer floats count as well.
            pairs = [(own.get(key, ""), others[each].get(key, "")) for key in [*own, *others[each]]]
            is_same_device = digests[each]["computes_on"] == digests[0]["computes_on"]
            if is_same_device and any(one.split()[-1:] != two.split()[-1:] for one, two in pairs):
                rank, is_proved = each, True
                break
        other = others[rank]
        key = next(key for key in [*own, *other] if own.get(key) != other.get(key))
        what = (
            f"the state of the tracked object {name!r} differs between the ranks: {key or 'it'} on "
            f"rank {rank} isn't as on rank 0. On resume every rank would get rank 0's state. Make "
            "and update it in the same way on every rank. If each rank needs its own state, "
            f"call ctx.track_each({name}=...) instead of ctx.track"
        )
        if is_proved and is_first:
            raise InvalidParamsError(what)
        notes[name] = what
    return notes


def _refuse_drifted(
    name: str, own: Tensors, of_ranks: Sequence[Sequence[bytes]], devices: Sequence[str]
) -> None:
    """Raise ReplicasDifferError if ranks that compute on the same have other weights."""
    odd: dict[int, list[int]] = {}  # ranks by the tensor
    for i in sorted(own.trained):
        for device in dict.fromkeys(devices):
            ranks = [rank for rank, there in enumerate(devices) if there == device]
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
        "other parameters are to be trained; draw what changes weights by itself (a new layer's, "
        "noise) from a torch.Generator seeded the same on every rank. "
        "If each rank trains its own model on purpose, "
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
    return [data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES)]
