"""Owns the caller's thread while its gang runs: events as they come, and the end of the gang
when the caller leaves.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed import Client

from prefect_torch_ddp.errors import GangCancelledError
from prefect_torch_ddp.gang.stop import StopSwitch, own_task_watch
from prefect_torch_ddp.protocol.events import NO_RANK, GangEvent, LogLine, RankStack, RecordsLeft

if TYPE_CHECKING:
    from concurrent.futures import Future as ThreadFuture


rank_logger = logging.getLogger("prefect_torch_ddp.ranks")

END_TIMEOUT_S = 15.0


def log_event(event: GangEvent) -> None:
    """Log a rank's line with the rank in front."""
    if isinstance(event, LogLine):
        if not rank_logger.hasHandlers():
            rank_logger.addHandler(
                logging.StreamHandler()
            )  # a plain script: its ranks' prints must show
        if rank_logger.level == logging.NOTSET:
            rank_logger.setLevel(logging.INFO)
        rank_logger.log(event.level, "%s", rank_text(event))
    elif isinstance(event, RankStack):
        log_event(stack_line(event))


def stack_line(stack: RankStack) -> LogLine:
    """Return a rank's stacks as one record of its log."""
    return LogLine(
        stack.rank, logging.ERROR, f"is at, the innermost call first:\n{stack.text.rstrip()}"
    )


def rank_text(line: LogLine) -> str:
    """Return a rank's line as people read it, the rank in front."""
    if line.rank == NO_RANK:
        return line.text
    return f"[rank {line.rank}] {line.logger + ': ' if line.logger else ''}{line.text}"


@dataclass(frozen=True)
class Leaving:
    """What becomes of the gang when its caller leaves."""

    stop: StopSwitch
    grace_s: float
    """How long its ranks get to stop."""


def follow(
    client: Client,
    work: Any,
    events: "queue.SimpleQueue[GangEvent | None]",
    on_event: Callable[[GangEvent], None],
    leaving: Leaving,
) -> list[bytes]:
    """Hand out events in the caller's thread until the work is done; end the gang when the
    caller leaves or isn't wanted.
    """
    why_unwanted = own_task_watch()
    over = threading.Event()
    done: ThreadFuture[list[bytes]] = asyncio.run_coroutine_threadsafe(
        _tell_when_over(work, over), _loop_of(client)
    )
    done.add_done_callback(lambda _: events.put(None))
    try:
        while True:
            _heed(why_unwanted(), leaving, client)
            try:
                # In short turns, so that Ctrl-C and Prefect's task timeout take effect here.
                event = events.get(timeout=0.5)
            except queue.Empty:
                continue
            if event is None:
                return done.result()
            on_event(event)
    except BaseException as error:
        # Not the gang's own end: the ranks get their time to stop, before the error goes on. A
        # second Ctrl-C ends that.
        if not done.done() and leaving.stop.set(
            _loop_of(client), f"{type(error).__name__} in its caller"
        ):
            over.wait(leaving.grace_s + END_TIMEOUT_S)
            _tell_the_end(done, events, on_event)
        raise
    finally:
        if not done.done():
            done.cancel()
            if not over.wait(END_TIMEOUT_S):
                rank_logger.error("the gang was not over %g s after its caller left", END_TIMEOUT_S)


def _heed(why: str, leaving: Leaving, client: Client) -> None:
    """Have the gang stop when its caller isn't wanted any more."""
    if why and not leaving.stop.why and not leaving.stop.set(_loop_of(client), why):
        msg = f"the gang was cancelled before its ranks had started, by {why}"
        raise GangCancelledError(msg)


def _tell_the_end(
    done: "ThreadFuture[list[bytes]]",
    events: "queue.SimpleQueue[GangEvent | None]",
    on_event: Callable[[GangEvent], None],
) -> None:
    """Log what the ranks said meanwhile and how the gang ended; the caller's own receiver may
    be what failed.
    """
    while not events.empty():
        event = events.get()
        if isinstance(event, RecordsLeft):
            on_event(event)  # which the caller's own receiver doesn't see
        elif event is not None:
            log_event(event)
    with contextlib.suppress(TimeoutError, CancelledError):
        error = done.exception(timeout=1.0)  # the ranks are gone a moment before it is there
        if isinstance(error, GangCancelledError):
            rank_logger.warning("%s", error)


def _loop_of(client: Client) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = client.loop.asyncio_loop  # type: ignore[union-attr]  # a running client has it
    return loop


async def _tell_when_over(work: Any, over: threading.Event) -> list[bytes]:
    """Await the work; a cancelled future is done at once, but `over` is set only when the ranks
    are gone.
    """
    try:
        values: list[bytes] = await work
        return values
    finally:
        over.set()
