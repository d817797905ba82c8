"""Owns the rule by which a gang is taken to hang, and who is missing in it. Pure.

Owns what people are told about a gang that hangs: who did not arrive, where it is, who waits
for it. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prefect_torch_ddp.protocol.agent import RankHeartbeat
from prefect_torch_ddp.protocol.events import Hang
from prefect_torch_ddp.protocol.heartbeat import Phase

WORKING_FACTOR = 10.0
"""How many times the limit a rank may take where long waits are usual, or while it works
hard."""
IN_BODY = {Phase.FUNCTION, Phase.STEP, Phase.EPOCH_END, Phase.COMPILING}
STRICT = {Phase.FUNCTION, Phase.STEP, Phase.STEP_END}
"""Where a rank that is idle waits for nothing that could come from elsewhere than its gang."""


@dataclass(frozen=True)
class Stall:
    """A gang without progress."""

    behind: tuple[RankHeartbeat, ...]
    """The ranks that have come least far; the others, if there are any, wait for them."""
    ahead: tuple[RankHeartbeat, ...]
    returned: tuple[RankHeartbeat, ...]
    silent_s: float
    is_hung: bool
    """Whether nothing explains it any more; else it is only worth a word."""


def find_stall(ranks: Sequence[RankHeartbeat], limit_s: float, *, from_start: bool) -> Stall | None:
    """Judge a gang by the heartbeats of all its ranks; None where it moves, or isn't watched
    yet.

    Args:
        ranks: all of the gang.
        limit_s: how long a rank may be idle in a step.
        from_start: whether the gang is watched before a rank has shown that it makes progress.
    """
    if any(rank.heartbeat.phase in (Phase.NONE, Phase.STARTING) for rank in ranks):
        return None
    if not (from_start or any(rank.heartbeat.armed for rank in ranks)):
        return None
    running = [rank for rank in ranks if rank.heartbeat.phase is not Phase.RETURNED]
    if not running:
        return None
    silent_s = min(rank.silent_s for rank in running)
    if silent_s < limit_s:
        return None
    least = min(map(_place, running))
    behind = tuple(rank for rank in running if _place(rank) == least)
    return Stall(
        behind=behind,
        ahead=tuple(rank for rank in running if rank not in behind),
        returned=tuple(rank for rank in ranks if rank not in running),
        silent_s=silent_s,
        is_hung=all(_is_over(rank, limit_s) for rank in behind),
    )


def _place(rank: RankHeartbeat) -> tuple[int, bool, int]:
    heartbeat = rank.heartbeat
    return heartbeat.step, heartbeat.phase not in IN_BODY, heartbeat.seq


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


_FRAME = re.compile(r'^\s*File "(?P<path>.*)", line (?P<line>\S+) in (?P<function>.*)$')
_NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<|/prefect_torch_ddp/(rank|data|checkpoint|metrics|storage)/"
)


def main_thread(stack: str) -> list[tuple[str, str, str]]:
    """Return path, line and function of each call of the main thread, the innermost first;
    faulthandler writes it last.
    """
    *_, last = re.split(r"^(?:Current thread|Thread) .*$", stack, flags=re.MULTILINE)
    matches = map(_FRAME.match, last.splitlines())
    return [(match["path"], match["line"], match["function"]) for match in matches if match]


def is_in_collective(stack: str) -> bool:
    """Tell whether the main thread waits in torch.distributed, or in a backward pass, which
    ends with DDP's all-reduce.
    """
    innermost = main_thread(stack)[:3]
    return any(
        "/torch/distributed/" in path or function == "_engine_run_backward"
        for path, _, function in innermost
    )


def spot(stack: str) -> str:
    """Return the user's innermost call as ` at train.py:34 in forward`, with torch's own behind
    it; empty without a stack.
    """
    calls = main_thread(stack)
    if not calls:
        return ""
    path, line, function = next(
        (call for call in calls if not _NOT_THE_USERS.search(call[0])), calls[0]
    )
    return f" at {path.rpartition('/')[2]}:{line} in {function}"


def doing(rank: RankHeartbeat) -> str:
    """Return what a rank is at, in words."""
    step = rank.heartbeat.step
    after = f" after step {step}" if step else ""
    return {
        Phase.FUNCTION: "in its function" + (f", in step {step}" if step else ""),
        Phase.SETUP: f"outside of ctx.steps{after}",
        Phase.RESTORING: "restoring a checkpoint",
        Phase.LOADING: f"waiting for the batch of step {step + 1}",
        Phase.STEP: f"in step {step}",
        Phase.EPOCH_END: f"in step {step}, the last of epoch {rank.heartbeat.epoch},",
        Phase.COMPILING: f"compiling in step {step}",
        Phase.STEP_END: f"at the end of step {step}",
        Phase.SAVING: f"saving the checkpoint of step {step}",
    }.get(rank.heartbeat.phase, "starting")


def summary(stall: Stall, hosts: Mapping[int, str], stacks: Mapping[int, str]) -> str:
    """Say it in one line."""
    behind = stall.behind
    each = [(doing(rank) + spot(stacks.get(rank.rank, ""))).rstrip(",") for rank in behind]
    named = [f"rank {rank.rank} on {hosts[rank.rank]}" for rank in behind]
    is_waiting = all(is_in_collective(stacks.get(rank.rank, "")) for rank in behind)
    if len(behind) == 1:
        verb = "waits for a rank that does not come" if is_waiting else "did not arrive"
        text = f"{named[0]} {verb}: for {behind[0].silent_s:.0f} s it has been {each[0]}"
    else:
        which = ", ".join(f"{who} is {what}" for who, what in zip(named, each, strict=True))
        text = f"{len(behind)} ranks made no progress for {stall.silent_s:.0f} s: {which}"
    if others := _others(stall, stacks):
        text += f", while {others}"
    counted = sorted((*behind, *stall.ahead), key=lambda rank: rank.rank)
    if is_waiting and len({rank.heartbeat.seq for rank in counted}) > 1:
        begun = ", ".join(f"rank {rank.rank} {rank.heartbeat.seq}" for rank in counted)
        text += f"; they have begun different numbers of collectives: {begun}"
    return text + "".join(
        f"; {rank.stopped} of rank {rank.rank} is stopped (SIGSTOP)"
        for rank in behind
        if rank.stopped
    )


def describe(stall: Stall, hosts: Mapping[int, str], stacks: Mapping[int, str]) -> Hang:
    """Make the value that the error carries."""
    first = stall.behind[0]
    return Hang(
        summary=summary(stall, hosts, stacks),
        ranks=tuple(rank.rank for rank in stall.behind),
        hosts=tuple(hosts[rank.rank] for rank in stall.behind),
        phase=first.heartbeat.phase.name.lower(),
        step=first.heartbeat.step,
        silent_s=stall.silent_s,
        stacks=dict(stacks),
    )


def _others(stall: Stall, stacks: Mapping[int, str]) -> str:
    """Say what the ranks are at that are not missing, those at the same thing together."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in stall.ahead:
        stack = stacks.get(rank.rank, "")
        if is_in_collective(stack):
            what = (
                "waits",
                "wait",
                f"in a collective of step {rank.heartbeat.step}"
                if rank.heartbeat.step
                else "in a collective",
            )
        else:
            what = ("is", "are", (doing(rank) + spot(stack)).rstrip(","))
        groups.setdefault(what, []).append(rank.rank)
    for rank in stall.returned:
        groups.setdefault(("has", "have", "returned"), []).append(rank.rank)
    return " and ".join(
        f"rank {ranks[0]} {singular} {what}"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, ranks))} {plural} {what}"
        for (singular, plural, what), ranks in groups.items()
    )
