"""What people read of a gang that hangs: which ranks are missing, where they are, who waits."""

import re
from collections.abc import Mapping

from prefect_torch_ddp.gang.caller.verdict.proof import is_in_collective, main_thread
from prefect_torch_ddp.gang.caller.verdict.stall import Stall
from prefect_torch_ddp.protocol.events import Hang
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.protocol.messages import RankHeartbeat


def describe(stall: Stall, hosts: Mapping[int, str], stacks: Mapping[int, str]) -> Hang:
    """Make the value that the error carries."""
    return Hang(
        summary=summarize(stall, hosts, stacks),
        ranks=tuple(rank.rank for rank in stall.behind),
        hosts=tuple(hosts[rank.rank] for rank in stall.behind),
        step=stall.behind[0].heartbeat.step,
        stacks=dict(stacks),
    )


def summarize(stall: Stall, hosts: Mapping[int, str], stacks: Mapping[int, str]) -> str:
    """Say it in one line."""
    behind = stall.behind
    is_waiting = all(is_in_collective(stacks.get(rank.rank, "")) for rank in behind)
    verb = "waits for a rank that does not come" if is_waiting else "did not arrive"
    text = ", ".join(
        f"rank {rank.rank} on {hosts[rank.rank]} {verb}: for {rank.silent_s:.0f} s it has been "
        f"{_doing(rank, stacks)}"
        for rank in behind
    )
    if others := _others(stall, stacks):
        text += f", while {others}"
    if is_waiting:
        text += (
            "; nobody comes: they wait in different collectives, or a rank has left its loop. Make "
            "the same calls on every rank, and stop all ranks together: ctx.request_stop(...)"
        )
    for rank in behind:
        if rank.stopped:
            text += f"; {rank.stopped} of rank {rank.rank} is stopped (SIGSTOP)"
    return text


def _others(stall: Stall, stacks: Mapping[int, str]) -> str:
    """Say what the ranks are at that are not missing, those at the same thing together."""
    groups: dict[str, list[int]] = {}
    for rank in stall.ahead:
        step = rank.heartbeat.step
        in_collective = "waiting in a collective" + (f" of step {step}" if step else "")
        what = (
            in_collective if is_in_collective(stacks.get(rank.rank, "")) else _doing(rank, stacks)
        )
        groups.setdefault(what, []).append(rank.rank)
    for rank in stall.returned:
        groups.setdefault("done with its function", []).append(rank.rank)
    return " and ".join(
        f"rank {ranks[0]} is {what}"
        if len(ranks) == 1
        else f"ranks {', '.join(map(str, sorted(ranks)))} are {what}"
        for what, ranks in groups.items()
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


_NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python3[.\d]*/|^<|"
    r"/prefect_torch_ddp/(rank|data|checkpoint|records|storage)/"
)


def _innermost_call(stack: str) -> str:
    """Return the user's innermost call as ` at train.py:34 in forward`; empty without a stack."""
    calls = main_thread(stack)
    if not calls:
        return ""
    users = (call for call in calls if not _NOT_THE_USERS.search(call[0]))
    path, line, function = next(users, calls[0])
    return f" at {path.rpartition('/')[2]}:{line} in {function}"
