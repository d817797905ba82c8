"""The link of a rank to its agent: events and the outcome go out, orders come in."""

import contextlib
import os
import pickle
import select
import signal
import socket
import threading
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.protocol.events import (
    MAX_TEXT,
    NO_RANK,
    FailureWritten,
    LogLine,
    Progress,
    RankEvent,
    RankFailure,
    RankReturned,
    RankStopped,
    Stopped,
    StoppedBy,
    encode_event,
)
from prefect_torch_ddp.protocol.rank import RankLaunch, RankOrder
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter

if TYPE_CHECKING:
    from pathlib import Path

MAX_NAME = 200
MAX_TROUBLE = 2_000
BEAT_S = 1.0
"""How often the agent's beat is expected, and the rank's collectives are counted."""


class Link:
    """What a rank can report to the process around it; this base class reports to nobody."""

    is_of_a_rank = False

    def __init__(self) -> None:
        """Write heartbeats to a page that nobody reads."""
        self.heartbeat = HeartbeatWriter()
        self.host = socket.gethostname()
        self.copies: Path | None = None
        """Folder where copies of records outlive this process; None if nobody would look."""

    def send(self, event: RankEvent) -> None:
        """Send an event; a Progress only if there is room: the next one says more."""

    def say_stopped(
        self,
        step: int,
        stopped_by: StoppedBy,
        last_saved: int | None = None,
        *,
        is_saved: bool = False,
    ) -> None:
        """Report that all ranks stop after a step, the last checkpoint, and if it has the step."""
        self.send(RankStopped(NO_RANK, Stopped(step, stopped_by, last_saved, is_saved)))

    def stop_requested(self) -> bool:
        """Tell whether the training is to stop at the next step that all ranks agree on."""
        return False


class AgentLink(Link):
    """The link to the agent that started this process.

    Records are datagrams, so threads and forked children may send them too.
    """

    is_of_a_rank = True

    def __init__(
        self,
        launch: RankLaunch,
        events_fd: int,
        outcome_fd: int,
        control_fd: int,
        heartbeat_fd: int,
    ) -> None:
        """Take over the inherited file descriptors; executed children don't inherit them."""
        super().__init__()
        for fd in (events_fd, outcome_fd, control_fd):
            os.set_inheritable(fd, False)  # noqa: FBT003 - positional in the standard library
        self._events = socket.socket(fileno=events_fd)
        self._outcome: IO[bytes] = os.fdopen(outcome_fd, "wb")
        self._control = control_fd
        self.heartbeat = HeartbeatWriter.shared(heartbeat_fd)
        self.heartbeat.count_from(launch.launched)
        self._pid = os.getpid()
        self._launch = launch
        self.host = launch.place.host
        self._is_settled = self._has_failed = False
        self._stop = threading.Event()
        self._leave = threading.Event()
        name = "prefect-torch-ddp-orders"
        threading.Thread(target=self._take_orders, name=name, daemon=True).start()

    def _take_orders(self) -> None:
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        has_beat = False
        missed = 0  # turns, not time: a rank that is stopped itself misses nothing meanwhile
        limit_s = self._launch.agent_timeout_s
        while not has_beat or missed * BEAT_S < limit_s:
            byte = os.read(self._control, 1) if poller.poll(BEAT_S * 1000) else None
            if byte == b"":
                break
            missed = missed + 1 if byte is None else 0
            order = RankOrder(byte) if byte else None
            if order is RankOrder.STOP:
                self._stop.set()
            elif order is RankOrder.LEAVE:
                self._leave.set()
            elif order is RankOrder.LOOK:
                self.heartbeat.write_stacks()
            else:
                has_beat |= order is RankOrder.BEAT
                if not self._is_settled:
                    self.heartbeat.beat()
        else:
            self._say_agent_silent()
        _end_session()

    def _say_agent_silent(self) -> None:
        """Leave a message for an agent that continues: it would report an unexplained kill."""
        place, limit_s = self._launch.place, self._launch.agent_timeout_s
        why = f"worker {place.worker} gave its ranks no sign of life for {limit_s:g} s"
        lost = RankFailure(place.rank, place.host, os.getpid(), "worker_lost", why)
        with contextlib.suppress(OSError):  # nobody has read for long: there may be no room
            self._events.setblocking(False)  # noqa: FBT003 - positional in the standard library
            self.failed(lost)

    def wait_to_leave(self, timeout_s: float | None) -> bool:
        """Wait until all ranks of the gang have returned, at most `timeout_s` seconds."""
        return self._leave.wait(timeout_s)

    def stop_requested(self) -> bool:
        """Tell whether the agent has asked the training to stop."""
        return self._stop.is_set()

    def send(self, event: RankEvent) -> None:
        """Send an event; long texts are cut."""
        if isinstance(event, LogLine):
            event = replace(event, text=event.text[:MAX_TEXT], logger=event.logger[:MAX_NAME])
        if not isinstance(event, Progress):
            self._events.send(encode_event(event))
            return
        short = replace(event, trouble=event.trouble[:MAX_TROUBLE])
        with contextlib.suppress(OSError):  # no room, too many metrics, or nobody there
            self._events.send(encode_event(short), socket.MSG_DONTWAIT)

    def returned(self, pickled_value: bytes) -> None:
        """Hand over what the function returned."""
        self._write_outcome(pickled_value)
        self._is_settled = True
        self.send(RankReturned(NO_RANK))

    def failed(self, failure: RankFailure) -> None:
        """Hand over how the function failed, unless its outcome is there already."""
        if not (self._is_settled or self._has_failed):
            self._has_failed = True
            self._write_outcome(pickle.dumps(failure))
            self.send(FailureWritten(NO_RANK))

    def end_if_forked(self) -> None:
        """End a child that user code forked and that came out of the function: it is no rank."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _write_outcome(self, data: bytes) -> None:
        self.end_if_forked()
        self._outcome.seek(0)
        self._outcome.truncate()
        self._outcome.write(data)
        self._outcome.flush()


def _end_session() -> None:
    """End this rank and all it started: the agent, which would do so, is gone or frozen."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


_link = Link()


def set_link(link: Link) -> None:
    """Install this process's link; called once, by the rank's main."""
    global _link  # noqa: PLW0603 - one process is one rank
    _link = link


def current_link() -> Link:
    """Return this process's link."""
    return _link


@exported_by("prefect_torch_ddp")
def report_progress() -> None:
    """Tell the supervisor that this rank makes progress; for functions that don't use `steps`.

    It matters if `progress_timeout_s` is set: then a plain function is watched from its start, and
    a function with a RankContext from the first call on, or from `ctx.steps`. A call takes less
    than a microsecond. Outside of a gang it does nothing.

    Example:
        In a function that `run_gang` runs with `progress_timeout_s`:

            from prefect_torch_ddp import report_progress

            for images, labels in loader:
                model(images)
                report_progress()
    """
    _link.heartbeat.progress()
