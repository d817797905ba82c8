"""The message about a hung gang: who did not arrive, where it is, who waits for it. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from prefect_torch_ddp.protocol.agent import RankHeartbeat
from prefect_torch_ddp.protocol.events import Hang
from prefect_torch_ddp.protocol.heartbeat import Phase


@dataclass(frozen=True)
class Stall:
    """A gang without progress."""

    behind: tuple[RankHeartbeat, ...]
    """The ranks that have come least far; the others, if there are any, wait for them."""
    ahead: tuple[RankHeartbeat, ...]
    returned: tuple[RankHeartbeat, ...]
    silent_s: float
    is_hung: bool
    """Whether nothing explains it any more; else it is only worth a warning."""


def describe(stall: Stall, hosts: Mapping[int, str], stacks: Mapping[int, str]) -> Hang:
    """Make the value that the error carries."""
    first = stall.behind[0]
    return Hang(
        summary=summarize(stall, hosts, stacks),
        ranks=tuple(rank.rank for rank in stall.behind),
        hosts=tuple(hosts[rank.rank] for rank in stall.behind),
        phase=first.heartbeat.phase.name.lower(),
        step=first.heartbeat.step,
        silent_s=stall.silent_s,
        stacks=dict(stacks),
    )


def summarize(stall: Stall, hosts: Mapping[int, str], stacks: Mapping[int, str]) -> str:
    """Say it in one line."""
    behind = stall.behind
    each = [_doing(rank, stacks) for rank in behind]
    named = [f"rank {rank.rank} on {hosts[rank.rank]}" for rank in behind]
    is_waiting = all(_is_in_collective(stacks, rank) for rank in behind)
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
    for rank in behind:
        if rank.stopped:
            text += f"; {rank.stopped} of rank {rank.rank} is stopped (SIGSTOP)"
    return text


def _others(stall: Stall, stacks: Mapping[int, str]) -> str:
    """Say what the ranks are at that are not missing, those at the same thing together."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank in stall.ahead:
        if _is_in_collective(stacks, rank):
            step = rank.heartbeat.step
            where = f"in a collective of step {step}" if step else "in a collective"
            what = ("waits", "wait", where)
        else:
            what = ("is", "are", _doing(rank, stacks))
        groups.setdefault(what, []).append(rank.rank)
    for rank in stall.returned:
        groups.setdefault(("has", "have", "returned"), []).append(rank.rank)
    return " and ".join(
        f"rank {ranks[0]} {singular} {what}"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, ranks))} {plural} {what}"
        for (singular, plural, what), ranks in groups.items()
    )


def _doing(rank: RankHeartbeat, stacks: Mapping[int, str]) -> str:
    """Return what a rank is at, and where: `in step 7 at train.py:34 in forward`."""
    step = rank.heartbeat.step
    after = f" after step {step}" if step else ""
    what = {
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
    return (what + _innermost_call(stacks.get(rank.rank, ""))).rstrip(",")


_FRAME = re.compile(r'^\s*File "(?P<path>.*)", line (?P<line>\S+) in (?P<function>.*)$')
_NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<|"
    r"/prefect_torch_ddp/(rank|data|checkpoint|records|storage)/"
)


def _main_thread(stack: str) -> list[tuple[str, str, str]]:
    """Return path, line and function of each call of the main thread, the innermost first."""
    # faulthandler writes the main thread last.
    *_, last = re.split(r"^(?:Current thread|Thread) .*$", stack, flags=re.MULTILINE)
    matches = map(_FRAME.match, last.splitlines())
    return [(match["path"], match["line"], match["function"]) for match in matches if match]


def _innermost_call(stack: str) -> str:
    """Return the user's innermost call as ` at train.py:34 in forward`; empty without a stack."""
    calls = _main_thread(stack)
    if not calls:
        return ""
    users = (call for call in calls if not _NOT_THE_USERS.search(call[0]))
    path, line, function = next(users, calls[0])
    return f" at {path.rpartition('/')[2]}:{line} in {function}"


def _is_in_collective(stacks: Mapping[int, str], rank: RankHeartbeat) -> bool:
    """Whether the main thread waits in torch.distributed, or in a backward pass.

    A backward pass ends with DDP's all-reduce.
    """
    innermost = _main_thread(stacks.get(rank.rank, ""))[:3]
    return any(
        "/torch/distributed/" in path or function == "_engine_run_backward"
        for path, _, function in innermost
    )
