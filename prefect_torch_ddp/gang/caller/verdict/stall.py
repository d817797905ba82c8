"""Stalls: when a gang counts as hung, what excuses it, and whom the others wait for. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_torch_ddp.gang.caller.verdict.proof import (
    awaits_data,
    is_absent,
    is_debugged,
    makes_data,
)
from prefect_torch_ddp.protocol.events import RankStack
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.protocol.messages import RankHeartbeat

WORKING_FACTOR = 10.0
"""How many times the limit applies if long waits are usual, or while a rank works hard."""
IN_BODY = {Phase.FUNCTION, Phase.STEP, Phase.EPOCH_END, Phase.COMPILING}
STRICT = {Phase.FUNCTION, Phase.STEP, Phase.STEP_END}
"""Where a rank that is idle waits for nothing that could come from elsewhere than its gang."""


@dataclass(frozen=True)
class Stall:
    """A gang without progress."""

    behind: tuple[RankHeartbeat, ...]
    """The ranks that have come least far, by their steps; stacks tell which the others wait for."""
    ahead: tuple[RankHeartbeat, ...]
    returned: tuple[RankHeartbeat, ...]
    silent_s: float
    is_hung: bool
    """Whether nothing explains it any more; else it is only worth a warning."""


def find_stall(ranks: Sequence[RankHeartbeat], limit_s: float, *, from_start: bool) -> Stall | None:
    """Judge a gang by the heartbeats of all its ranks; None if it moves or isn't watched yet."""
    if any(rank.heartbeat.phase in (Phase.NONE, Phase.STARTING) for rank in ranks):
        return None
    if not (from_start or any(rank.heartbeat.armed for rank in ranks)):
        return None
    over = (Phase.RETURNED, Phase.ENDED)
    running = [rank for rank in ranks if rank.heartbeat.phase not in over]
    if not running:
        return None
    silent_s = min(rank.silent_s for rank in running)
    if silent_s < limit_s:
        return None
    least = min(map(_progress_of, running))
    behind = tuple(rank for rank in running if _progress_of(rank) == least)
    return Stall(
        behind=behind,
        ahead=tuple(rank for rank in running if rank not in behind),
        returned=tuple(rank for rank in ranks if rank not in running),
        silent_s=silent_s,
        is_hung=all(_is_over(rank, limit_s) for rank in behind),
    )


def _progress_of(rank: RankHeartbeat) -> tuple[int, bool]:
    heartbeat = rank.heartbeat
    return heartbeat.step, heartbeat.phase not in IN_BODY


def _is_over(rank: RankHeartbeat, limit_s: float) -> bool:
    """Tell whether nothing explains a rank's silence any more.

    A rank that works hard may be in a long step; loading, compiling, saving, restoring and
    validating may wait for long.
    """
    if rank.stopped:
        return rank.silent_s >= limit_s
    if rank.heartbeat.phase in STRICT:
        return rank.idle_s >= limit_s or rank.silent_s >= WORKING_FACTOR * limit_s
    return rank.idle_s >= WORKING_FACTOR * limit_s


def excuse_for(stall: Stall, stacks: Mapping[int, RankStack], limit_s: float) -> str:
    """Return what in the stacks explains a gang's silence; empty if nothing does.

    A person holds a rank with a debugger, or those behind wait for a rank that is ahead of them and
    may be at work for longer: it saves or validates, say, and will send them something. Or they
    all wait for datasets that other processes make, or make one themselves and aren't idle.
    """
    held = [rank for rank, each in stacks.items() if each.is_traced or is_debugged(each.text)]
    if held:
        return f"rank {min(held)} is in a debugger"
    texts = {rank: stack.text for rank, stack in stacks.items()}
    absent = _absent(stall, texts)
    working = [each for each in absent if not _is_over(each, limit_s)]
    if working:
        return f"the others wait for rank {working[0].rank}, which may still be working"
    # Not if only some of them do: another one may hold the lock that they wait for, and hang.
    if absent and all(_gets_data(each, texts, limit_s) for each in absent):
        first = min(each.rank for each in absent)
        return f"rank {first} waits until a dataset is on its host's disk"
    return ""


def _gets_data(rank: RankHeartbeat, stacks: Mapping[int, str], limit_s: float) -> bool:
    stack = stacks.get(rank.rank, "")
    is_making = makes_data(stack) and rank.idle_s < limit_s
    return not rank.stopped and (awaits_data(stack) or is_making)


def _absent(stall: Stall, stacks: Mapping[int, str]) -> tuple[RankHeartbeat, ...]:
    """Return the ranks for which those wait that are in a collective; none if all are in one.

    They are the lagging ranks that are in none; or, if all of those wait, those ahead of them.
    """
    for ranks in (stall.behind, stall.ahead):
        absent = [each for each in ranks if is_absent(stacks.get(each.rank, ""))]
        if absent:
            return tuple(absent)
    return ()


def missing_by(stall: Stall, stacks: Mapping[int, str]) -> Stall:
    """Return the stall with only those behind for which the others wait; as it is if all wait."""
    missing = _absent(stall, stacks)
    if not missing:
        return stall
    others = tuple(each for each in (*stall.ahead, *stall.behind) if each not in missing)
    return replace(stall, behind=missing, ahead=others)
