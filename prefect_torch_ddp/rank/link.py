"""Owns a rank's end of the pipes to its agent: events out, orders in, and the outcome.

Owns the link by which a rank's context talks to the process around it.
"""

import os
import pickle
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol

import cloudpickle

from prefect_torch_ddp.protocol.events import (
    MAX_TEXT,
    NO_RANK,
    FailureWritten,
    FunctionEnded,
    LogLine,
    Progress,
    RankEvent,
    RankFailure,
    RankListens,
    RankReturned,
    RankStopped,
    Stopped,
    encode_event,
)
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.protocol.rank import RankOrder
from prefect_torch_ddp.rank.failure import is_collateral, retryability_of
from prefect_torch_ddp.rank.heartbeat import HeartbeatWriter

MAX_NAME = 200
MAX_SUMMARY = 2_000
BEAT_S = 1.0
"""How often the collectives that the rank has begun are counted, and the agent's beat is
expected."""
AGENT_TIMEOUT_S = 14.0
"""A rank whose agent beat every second and then is silent for so long ends: its worker is
stopped, or frozen for good."""
_OUR_FRAMES = {str(Path(__file__).with_name(name)) for name in ("life.py", "entry.py")}


class Channel:
    """Talks to the agent that started this process.

    Records are datagrams, so threads and forked children may write too.
    """

    def __init__(self, events_fd: int, outcome_fd: int, control_fd: int, heartbeat_fd: int) -> None:
        """Take over the inherited file descriptors; children that are executed don't inherit
        them.
        """
        for fd in (events_fd, outcome_fd, control_fd):
            os.set_inheritable(fd, False)  # noqa: FBT003 - the standard library takes it by position
        self._events = socket.socket(fileno=events_fd)
        self._outcome: IO[bytes] = os.fdopen(outcome_fd, "wb")
        self._control = control_fd
        self.heartbeat = HeartbeatWriter.shared(heartbeat_fd)
        self.copies: Path | None = None
        self._pid = os.getpid()
        self._is_settled = False
        self._stop = threading.Event()
        self._leave = threading.Event()

    def listen(self) -> None:
        """Start taking orders."""
        threading.Thread(
            target=self._take_orders, name="prefect-torch-ddp-orders", daemon=True
        ).start()

    def _take_orders(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        has_beat, missed = (
            False,
            0,
        )  # turns, not time: while this process is stopped itself it misses nothing
        while not has_beat or missed * BEAT_S < AGENT_TIMEOUT_S:
            word = os.read(self._control, 1) if poller.poll(BEAT_S * 1000) else None
            if word == b"":
                break
            missed = missed + 1 if word is None else 0
            order = RankOrder(word) if word else None
            if order in (RankOrder.STOP, RankOrder.LEAVE):
                (self._stop if order is RankOrder.STOP else self._leave).set()
                continue
            has_beat |= order is RankOrder.BEAT
            if not self._is_settled:
                self.heartbeat.beat()
        _end_session()

    def wait_to_leave(self, timeout_s: float | None) -> bool:
        """Wait until all ranks of the gang have returned, at most so long."""
        return self._leave.wait(timeout_s)

    def stop_requested(self) -> bool:
        """Tell whether the supervisor wants the training to stop at the next agreed step."""
        return self._stop.is_set()

    def send_progress(self, progress: Progress) -> None:
        """Send it if there is room, else drop it: the next one says more."""
        short = replace(progress, trouble=progress.trouble[:MAX_SUMMARY])
        try:
            self._events.send(encode_event(short), socket.MSG_DONTWAIT)
        except OSError:  # no room, too many metrics for one record, or nobody there
            return

    def listens(self) -> None:
        """Say that the training reacts to a stop from now on: its agent gives it time then
        instead of killing it.
        """
        self._send(RankListens(NO_RANK))

    def send_stopped(self, stopped: Stopped) -> None:
        """Say that the training stopped before its end."""
        self._send(RankStopped(NO_RANK, stopped))

    def function_ended(self) -> None:
        """Say that the function is over, though the last checkpoint may still wait for
        peers.
        """
        self._send(FunctionEnded(NO_RANK))

    def send_log(self, level: int, logger: str, text: str) -> None:
        """Send a log record; long ones are cut."""
        self._send(LogLine(NO_RANK, level, text[:MAX_TEXT], logger[:MAX_NAME]))

    def returned(self, value: Any, pickle_value: Callable[[Any], bytes]) -> None:
        """Hand over what the function returned; raises what the pickling raises."""
        self._write_outcome(pickle_value(value))
        self._is_settled = True
        self.heartbeat.enter(Phase.RETURNED)
        self._send(RankReturned(NO_RANK))

    def failed(self, failure: RankFailure) -> None:
        """Hand over how the function failed; nothing that goes wrong after it returned replaces
        its value.
        """
        if self._is_settled:
            return
        self._write_outcome(pickle.dumps(failure))
        self._send(FailureWritten(NO_RANK))

    def _write_outcome(self, data: bytes) -> None:
        if os.getpid() != self._pid:
            os._exit(
                0
            )  # a child that user code forked and that came back out of the function: its outcome isn't the rank's
        self._outcome.seek(0)
        self._outcome.truncate()
        self._outcome.write(data)
        self._outcome.flush()

    def _send(self, event: RankEvent) -> None:
        self._events.send(encode_event(event))


def _end_session() -> None:
    """End this rank and all that it started: the agent is gone or frozen, and with it whoever
    would do so.
    """
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def describe(error: BaseException, rank: int, host: str) -> RankFailure:
    """Turn an exception into a value that survives the trip home, whatever its class."""
    leaving = isinstance(error, SystemExit | KeyboardInterrupt)
    trace = error.__traceback__
    while (
        trace is not None
        and trace.tb_next is not None
        and trace.tb_frame.f_code.co_filename in _OUR_FRAMES
    ):
        trace = trace.tb_next  # the user's traceback begins at the user's code
    summary = "".join(traceback.format_exception_only(error)).strip()[:MAX_SUMMARY]
    if isinstance(error, SystemExit):
        summary = f"left by sys.exit({error.code!r}) before its function returned"
    return RankFailure(
        rank=rank,
        host=host,
        pid=os.getpid(),
        kind="exit" if isinstance(error, SystemExit) else "exception",
        summary=summary,
        is_collateral=is_collateral(error),
        traceback_text="".join(traceback.format_exception(type(error), error, trace))[-MAX_TEXT:],
        exception_type=f"{type(error).__module__}.{type(error).__qualname__}",
        exception_pickle=None if leaving else _pickle_exception(error),
        exit_code=_exit_code(error),
        retryability=retryability_of(error),
    )


def _exit_code(error: BaseException) -> int | None:
    if not isinstance(error, SystemExit):
        return None
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _pickle_exception(error: BaseException) -> bytes | None:
    """Pickle the user's exception, if it also unpickles; many classes with arguments of their
    own don't.
    """
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
    except BaseException:  # noqa: BLE001 - user classes refuse in every way; type and text survive without
        return None
    return data


class ControlLink(Protocol):
    """What the supervisor's side offers to a rank; no call blocks."""

    heartbeat: HeartbeatWriter
    """Where the rank marks what it is at."""
    copies: Path | None
    """Where copies of records outlive this process until the storage has them; None: nobody
    would look there."""

    def send_progress(self, progress: Progress) -> None:
        """Send it if there is room, else drop it."""
        ...

    def stop_requested(self) -> bool:
        """Tell whether the training is to stop at the next step that all ranks agree on."""
        ...

    def listens(self) -> None:
        """Say that this rank's training reacts to a stop from now on."""
        ...

    def send_stopped(self, stopped: Stopped) -> None:
        """Say that the training stopped before its end."""
        ...

    def function_ended(self) -> None:
        """Say that the user's function is over: a peer that waits for this rank in a collective
        waits in vain.
        """
        ...


class NoLink:
    """The link of a rank that nobody supervises (`RankContext.local()`)."""

    def __init__(self) -> None:
        """Mark on a page that nobody reads."""
        self.heartbeat = HeartbeatWriter()
        self.copies: Path | None = None

    def send_progress(self, progress: Progress) -> None:
        """Drop it."""

    def stop_requested(self) -> bool:
        """Never."""
        return False

    def listens(self) -> None:
        """Tell nobody."""

    def send_stopped(self, stopped: Stopped) -> None:
        """Tell nobody."""

    def function_ended(self) -> None:
        """Tell nobody."""


_link: ControlLink = NoLink()


def set_link(link: ControlLink) -> None:
    """Install the link; called once, by the rank's main."""
    global _link  # noqa: PLW0603 - one process is one rank
    _link = link


def current_link() -> ControlLink:
    """Return this process's link."""
    return _link


def report_progress() -> None:
    """Tell the supervisor that this rank makes progress, from a plain function that neither
    steps nor reports.

    Costs less than a microsecond. Once a rank has called it, its gang is expected to go on
    making progress, where its `progress_timeout_s` is set. Outside of a gang it does nothing.
    """
    _link.heartbeat.progress()
