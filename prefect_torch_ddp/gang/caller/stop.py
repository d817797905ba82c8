"""The caller's thread while its gang runs: it handles events, and stops the gang when it leaves."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from distributed import Client

from prefect_torch_ddp.errors import GangCancelledError
from prefect_torch_ddp.gang.caller.lines import LineMerger, log_event, rank_logger
from prefect_torch_ddp.gang.liveness import own_task_watch
from prefect_torch_ddp.protocol.events import GangEvent, RecordsLeft

if TYPE_CHECKING:
    from concurrent.futures import Future as ThreadFuture

END_TIMEOUT_S = 15.0
TURN_S = 0.5


class StopSwitch:
    """Asks a running gang to stop: set by its caller's thread, obeyed on the event loop."""

    def __init__(self, grace_s: float) -> None:
        """Start unset."""
        self.grace_s = grace_s
        self.why = ""
        self._has_ranks = threading.Event()
        self._is_set = asyncio.Event()

    def set(self, loop: asyncio.AbstractEventLoop, why: str) -> bool:
        """Ask the ranks to stop; False when none has been started yet."""
        if not self._has_ranks.is_set():
            return False
        self.why = self.why or why
        loop.call_soon_threadsafe(self._is_set.set)
        return True

    async def wait(self) -> str:
        """Say that there are ranks now, wait until the switch is set, and return by what."""
        self._has_ranks.set()
        await self._is_set.wait()
        return self.why


def follow(
    client: Client,
    work: Coroutine[Any, Any, list[bytes]],
    events: "queue.SimpleQueue[GangEvent | None]",
    on_event: Callable[[GangEvent], None],
    stop: StopSwitch,
) -> list[bytes]:
    """Pass on events in the caller's thread until the work is done, and return its result.

    Ends the gang when the caller leaves, by Ctrl-C for instance, or when its own Dask task isn't
    wanted any more.
    """
    loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop  # type: ignore[union-attr]
    why_unwanted = own_task_watch()
    over = threading.Event()
    done = asyncio.run_coroutine_threadsafe(_tell_when_over(work, over), loop)
    done.add_done_callback(lambda _: events.put(None))
    lines = LineMerger(on_event)
    try:
        # In short turns, so that Ctrl-C and Prefect's task timeout take effect here: at the jump
        # back to the loop's start, for which Python 3.11 and 3.12 look one instruction before it
        # for the handler. Were the loop the first in its `try`, that would find none.
        turn_s = TURN_S
        while True:
            _obey(why_unwanted(), stop, loop)
            try:
                event = events.get(timeout=turn_s)
            except queue.Empty:
                lines.pass_on_due()
                continue
            if event is None:
                lines.pass_on_all()
                return done.result()
            lines.take(event)
    except BaseException as error:
        # Not the gang's own end: the ranks get their time to stop before the error is raised
        # again. A second Ctrl-C ends that.
        if not done.done() and _has_stopped(over, stop, loop, error):
            _log_the_end(done, events, lines, on_event)
        raise
    finally:
        if not done.done():
            done.cancel()
            if not over.wait(END_TIMEOUT_S):
                rank_logger.error(
                    "the gang had not ended %g s after its caller left", END_TIMEOUT_S
                )


def named(error: BaseException) -> str:
    """Return what ended a caller: a signal by the name that users know, an error by its class."""
    name = type(error).__name__  # by name, since TerminationSignal is Prefect's
    signals = {"KeyboardInterrupt": "Ctrl-C (SIGINT)", "TerminationSignal": "SIGTERM"}
    return signals.get(name, name)


def _obey(why: str, stop: StopSwitch, loop: asyncio.AbstractEventLoop) -> None:
    if why and not stop.why and not stop.set(loop, why):
        msg = f"the gang was cancelled before its ranks had started, by {why}"
        raise GangCancelledError(msg)


def _has_stopped(
    over: threading.Event, stop: StopSwitch, loop: asyncio.AbstractEventLoop, error: BaseException
) -> bool:
    """Stop the ranks and wait for that; False if there are none, or if Ctrl-C came again."""
    if not stop.set(loop, f"{named(error)} in its caller"):
        return False
    is_pressed = isinstance(error, KeyboardInterrupt)
    if is_pressed:
        get = "the ranks get up to %g s to stop, a training after one step and saved"
        rank_logger.warning(f"{get}; Ctrl-C again ends them at once", stop.grace_s)
    try:
        over.wait(stop.grace_s + END_TIMEOUT_S)
    except KeyboardInterrupt:
        if not is_pressed:
            raise
        return False  # its frames would only repeat those of the first one
    return True


async def _tell_when_over(
    work: Coroutine[Any, Any, list[bytes]], over: threading.Event
) -> list[bytes]:
    # A cancelled future is done at once; `over` is set only when the ranks are gone.
    try:
        return await work
    finally:
        over.set()


def _log_the_end(
    done: "ThreadFuture[list[bytes]]",
    events: "queue.SimpleQueue[GangEvent | None]",
    lines: LineMerger,
    on_event: Callable[[GangEvent], None],
) -> None:
    """Log what the ranks reported meanwhile; the caller's own receiver may have failed."""
    # That one doesn't see the records.
    lines.pass_on = lambda event: (on_event if isinstance(event, RecordsLeft) else log_event)(event)
    while not events.empty():
        event = events.get()
        if event is not None:
            lines.take(event)
    lines.pass_on_all()
    with contextlib.suppress(TimeoutError, CancelledError):
        error = done.exception(timeout=1.0)  # the ranks are gone a moment before it is there
        if isinstance(error, GangCancelledError):
            rank_logger.warning("%s", error)
