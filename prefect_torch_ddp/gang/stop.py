"""Owns how a running gang is asked to stop at an agreed step: by its caller's thread, for the
event loop to obey.
"""

import asyncio
import threading
from collections.abc import Callable

from distributed import get_worker
from distributed.core import Status
from distributed.worker import thread_state

UNWANTED_STATES = ("cancelled", "released", "forgotten")


class StopSwitch:
    """Set once, by the caller's thread; watched by the gang's supervision."""

    def __init__(self) -> None:
        """Start unset."""
        self.why = ""
        self._obeyed = threading.Event()
        self._set = asyncio.Event()

    def set(self, loop: asyncio.AbstractEventLoop, why: str) -> bool:
        """Ask; False when the ranks haven't been started, so that there is nobody to ask."""
        if not self._obeyed.is_set():
            return False
        self.why = self.why or why
        loop.call_soon_threadsafe(self._set.set)
        return True

    async def wait(self) -> str:
        """Wait, on the event loop, until it is set; return by what.

        From now on there is somebody to ask.
        """
        self._obeyed.set()
        await self._set.wait()
        return self.why


def own_task_watch() -> Callable[[], str]:
    """Return a check whether the Dask task that this thread runs is still wanted: empty, or why
    it isn't; no task: empty.
    """
    try:
        worker = get_worker()
        key = thread_state.key
    except (ValueError, AttributeError):
        return lambda: ""

    def why_unwanted() -> str:
        if worker.status in (Status.closing, Status.closed, Status.failed):
            return f"the closing of worker {worker.address}, which ran its caller"
        task = worker.state.tasks.get(key)
        if task is None or task.state in UNWANTED_STATES:
            return "the cancellation of the Dask task that called it"
        return ""

    return why_unwanted
