"""The processes that watch flows, which tests tell from the others that a flow starts."""

from collections.abc import Sequence
from contextlib import suppress

import psutil

from tests.support.waiting import wait_until

MODULE = "prefect_torch_ddp.tasks.watch.flow_watch"


def is_watch(process: psutil.Process) -> bool:
    """Tell the process that watches a flow; one that has ended is none any more."""
    with suppress(psutil.NoSuchProcess):
        # Popen returns a moment before the kernel has the new program's arguments to show. One
        # that has ended, and wasn't waited for, shows none ever again.
        wait_until(lambda: process.cmdline() or process.status() == psutil.STATUS_ZOMBIE)
        return MODULE in process.cmdline()
    return False


def watch_of(flow_pid: int) -> psutil.Process:
    """Find the process that watches the flow of another one, also when that has died."""
    commands = ((each, each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"]))
    (found,) = (each for each, words in commands if _watches(words, flow_pid))
    return found


def _watches(words: Sequence[str], flow_pid: int) -> bool:
    return MODULE in words and str(flow_pid) in words
