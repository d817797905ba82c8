"""What stacks prove: a rank waits in a collective, all wait in vain, one is in a debugger.

A watch only suspects. Nobody is stopped or blamed by a count of collectives: torch counts other
operations with them, and the number is up to a second old. Pure.
"""

import re
from collections.abc import Collection, Mapping

from prefect_torch_ddp.protocol.events import RankStack

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
