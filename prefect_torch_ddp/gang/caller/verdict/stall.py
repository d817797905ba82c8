"""Whether a gang hangs, by its heartbeats and its stacks, and whom its ranks wait for. Pure.

By heartbeats a hang is only suspected. Stacks excuse the gang, or prove that its ranks wait in
vain. Nobody is stopped or blamed by a count of collectives: torch counts other operations with
them, and the number is up to a second old.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_torch_ddp.protocol.events import RankStack
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.protocol.messages import RankHeartbeat

WORKING_FACTOR = 10.0
"""How many times the limit applies if long waits are usual, or while a rank works hard."""
IN_BODY = {Phase.FUNCTION, Phase.STEP, Phase.EPOCH_END, Phase.COMPILING}
STRICT = {Phase.FUNCTION, Phase.STEP, Phase.STEP_END}
"""Where a rank that is idle waits for nothing that could come from elsewhere than its gang."""
BUSY_CPU_S = 0.1
"""Processor time between two looks at a rank from which on it isn't idle."""
BUSY_BYTES = 65_536
"""The same for what it read and wrote: a large message over a slow network takes no processor."""

Call = tuple[str, str, str]
"""Path, line and function."""

_FRAME = re.compile(r'^\s*File "(?P<path>.*)", line (?P<line>\S+) in (?P<function>.*)$')
_COLLECTIVES = re.compile(r"/torch/distributed/(distributed_c10d|_functional_collectives)\.py$")
_WAITING = frozenset(
    [
        "_engine_run_backward",  # a backward pass ends with DDP's all-reduce
        "_distributed_broadcast_coalesced",
        "_sync_params_and_buffers",
        "_verify_param_shape_across_processes",
    ]
)
"""Functions of torch outside of these modules that wait for other ranks."""
_DEBUGGERS = re.compile(
    r"/python3[.\d]*/(bdb|pdb)\.py$|"  # not a user's folder of proteins
    r"/(ipdb|pudb|remote_pdb|web_pdb|debugpy|pydevd|_pydevd_bundle)(\.py$|/)"
)

_LOCK = re.compile(r"/prefect_torch_ddp/data/datasets/dataset_store\.py$"), "wait_for_turn"
"""Where a rank waits for a dataset that another process of its host fetches or decodes."""
_COPYING = re.compile(r"/prefect_torch_ddp/data/tables/local_copy\.py$"), "_make"


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


def wait_in_vain(
    running: Collection[int], before: Mapping[int, RankStack], after: Mapping[int, RankStack]
) -> bool:
    """Tell whether all ranks that still run wait for each other, or for one that has ended.

    Proven is that if two looks, some seconds apart, find each of them at the very same place in a
    collective, with no use of a processor and no data moved between. A rank that computes, sleeps,
    writes a file, or waits for something else may end its wait and that of the others. So may a
    person with a debugger.
    """
    return bool(running) and all(
        rank in before and rank in after and _is_still(before[rank], after[rank])
        for rank in running
    )


def _is_still(before: RankStack, after: RankStack) -> bool:
    is_same = main_thread(before.text) == main_thread(after.text)
    moved_bytes = after.io_bytes - before.io_bytes - len(after.text)
    is_idle = after.cpu_s - before.cpu_s < BUSY_CPU_S and moved_bytes < BUSY_BYTES
    is_free = not (after.is_traced or is_debugged(after.text))
    return is_same and is_idle and is_free and is_in_collective(after.text)


def lacks_main_thread(stack: str) -> bool:
    """Tell whether a rank has more threads than the 100 that faulthandler writes, newest first."""
    return stack.endswith("\n...\n")


def main_thread(stack: str) -> list[Call]:
    """Return the calls of the main thread, the innermost first; none if it was left out."""
    if lacks_main_thread(stack):
        return []
    # faulthandler writes the main thread last.
    *_, last = re.split(r"^(?:Current thread|Thread) .*$", stack, flags=re.MULTILINE)
    matches = map(_FRAME.match, last.splitlines())
    return [(match["path"], match["line"], match["function"]) for match in matches if match]


def is_in_collective(stack: str) -> bool:
    """Tell whether the main thread waits for other ranks: in a collective, or a backward pass."""
    innermost = main_thread(stack)[:1]
    return any(_COLLECTIVES.search(path) or name in _WAITING for path, _, name in innermost)


def is_absent(stack: str) -> bool:
    """Tell whether the others may wait for this rank: it is known not to be in a collective."""
    return not (is_in_collective(stack) or lacks_main_thread(stack))


def awaits_data(stack: str) -> bool:
    """Tell whether a rank waits for another process of its host, which makes the same dataset."""
    path, name = _LOCK
    return any(path.search(at) and name == of for at, _, of in main_thread(stack)[:1])


def makes_data(stack: str) -> bool:
    """Tell whether a rank decodes a table into its host's local copy."""
    path, name = _COPYING
    return any(path.search(at) and name == of for at, _, of in main_thread(stack))


def is_debugged(stack: str) -> bool:
    """Tell whether a thread is held by a debugger, at a breakpoint or after one."""
    matches = filter(None, map(_FRAME.match, stack.splitlines()))
    return any(_DEBUGGERS.search(match["path"]) for match in matches)
