"""Owns one rank's process as its agent sees it: its start, its pipes, its death.

Owns what is said of a rank whose process ended before its function returned. Pure.
"""

import contextlib
import logging
import os
import pickle
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from prefect_torch_ddp.errors import HostUnavailableError
from prefect_torch_ddp.gang.worker.child import Child, ExecChild, kill_session, rank_environment
from prefect_torch_ddp.gang.worker.fork_server_pool import host_of
from prefect_torch_ddp.gang.worker.oom import OomWatch
from prefect_torch_ddp.gang.worker.rank_io import HeartbeatPage, Leftovers, LineCutter
from prefect_torch_ddp.protocol.events import (
    MAX_DATAGRAM_BYTES,
    FailureWritten,
    FunctionEnded,
    GangEvent,
    LogLine,
    Progress,
    RankEvent,
    RankFailedEvent,
    RankFailure,
    RankListens,
    RankReturned,
    RankStopped,
    RecordsLeft,
    decode_event,
)
from prefect_torch_ddp.protocol.rank import (
    COPIES,
    Launcher,
    LaunchPage,
    RankFiles,
    RankLaunch,
    RankOrder,
)
from prefect_torch_ddp.records.log import left_behind

logger = logging.getLogger(__name__)

CHUNK_BYTES = 65_536
MAX_CHUNKS = 64


class RankProcess:
    """A process in a session of its own, which runs one rank."""

    def __init__(self, launch: RankLaunch, payload: bytes) -> None:
        """Start the process; raises OSError where that fails, with nothing left behind."""
        self.place = launch.place
        self._out, self._err = LineCutter(), LineCutter()
        self.returned = False
        self.listens = False
        """Whether its training reacts to a stop."""
        self.failure: RankFailure | None = None
        self.reaped = False
        self._memory = OomWatch()
        self._leftovers = Leftovers()
        environment = rank_environment(os.environ, launch)
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self._outcome: IO[bytes] = ours.enter_context(tempfile.TemporaryFile())
            self.page = ours.enter_context(contextlib.closing(HeartbeatPage()))
            page = theirs.enter_context(tempfile.TemporaryFile())
            folders = str(Path.cwd()), str(self._leftovers.folder)
            LaunchPage(launch, environment, *folders).write(page, payload)
            # Datagrams: a record stays whole also when forked DataLoader workers of the rank
            # write at the same time.
            self._events, events = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            ours.enter_context(self._events)
            theirs.enter_context(events)
            self._events.setblocking(False)  # noqa: FBT003 - the standard library takes it by position
            events.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
            control, self._control = _pipe(theirs, ours)
            os.set_blocking(self._control.fileno(), False)
            self._stdout, stdout = _pipe(ours, theirs)
            self._stderr, stderr = _pipe(ours, theirs)
            files = RankFiles(
                launch=page.fileno(),
                events=events.fileno(),
                outcome=self._outcome.fileno(),
                control=control.fileno(),
                heartbeat=self.page.fileno(),
                stdout=stdout.fileno(),
                stderr=stderr.fileno(),
                store=launch.store_fd,
            )
            self._child = start_child(launch.place.worker, files, environment, launch.launcher)
            ours.pop_all()

    @property
    def pid(self) -> int:
        """The process id, also the id of its session and process group."""
        return self._child.pid

    @property
    def is_settled(self) -> bool:
        """Whether the rank's outcome is known."""
        return self.returned or self.failure is not None

    def file_descriptors(self, *, with_output: bool) -> Iterator[int]:
        """Yield what to wait on: output and events of the rank, and its death."""
        if with_output:
            yield from (pipe.fileno() for pipe in (self._stdout, self._stderr) if not pipe.closed)
            yield self._events.fileno()
        if self._child.death_fd is not None:
            yield self._child.death_fd

    def read(self, *, to_the_end: bool = False) -> Iterator[GangEvent]:
        """Yield what the rank has said so far, without waiting; a chunk of its output, or all
        there is.
        """
        for pipe, cutter in ((self._stdout, self._out), (self._stderr, self._err)):
            for _ in range(
                MAX_CHUNKS if to_the_end else 1
            ):  # a process that left the session may write for ever
                if pipe.closed:
                    break
                chunk = _read_chunk(pipe)
                if chunk is None:
                    break
                yield from (
                    LogLine(self.place.rank, logging.INFO, line)
                    for line in cutter.feed(chunk, final=not chunk)
                )
                if not chunk:
                    pipe.close()
        yield from self._read_events()

    def _read_events(self) -> Iterator[GangEvent]:
        while True:
            try:
                record = self._events.recv(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            try:
                event = self._take(decode_event(record, self.place.rank))
            except (ValueError, KeyError, TypeError):
                logger.warning(
                    "rank %d sent a record that can't be read: %.80r", self.place.rank, record
                )
                continue
            if event is not None:
                yield event

    def _take(self, event: RankEvent) -> GangEvent | None:
        match event:
            case RankListens():
                self.listens = True
            case FailureWritten() if not self.is_settled:
                self._outcome.seek(0)
                self.failure = replace(pickle.load(self._outcome), step=self._step())
                return RankFailedEvent(self.failure)
            case RankReturned() if not self.is_settled:
                self.returned = True
                return event
            case LogLine() | Progress() | RankStopped() | FunctionEnded():
                return event
        return None

    def value(self) -> bytes:
        """Return the pickle of what the rank's function returned."""
        self._outcome.seek(0)
        return self._outcome.read()

    def tell(self, order: RankOrder) -> None:
        """Write an order to the rank's control pipe; a rank that is gone needs none."""
        with contextlib.suppress(
            BrokenPipeError, BlockingIOError
        ):  # full: it was stopped for hours
            os.write(self._control.fileno(), order.value)

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, reaped or not."""
        return self.reaped or self._child.is_dead

    def bury(self) -> Iterator[GangEvent]:
        """Kill the process and all that its session left, reap it; yield its last words, and
        its death if that is news.
        """
        # Before the reaping: until then the number can't be another process group's.
        kill_session(self.pid)
        status = self._child.reap()
        self.reaped = True
        # What it said last may hold its outcome, which says more than its death.
        yield from self.read(to_the_end=True)
        if not self.is_settled:
            self.failure = self._death_failure(status)
            yield RankFailedEvent(self.failure)

    def _death_failure(self, status: int) -> RankFailure:
        was_signal = status < 0
        memory = self._memory.report(self.pid) if status == -signal.SIGKILL else None
        return RankFailure(
            rank=self.place.rank,
            host=self.place.host,
            pid=self.pid,
            kind="signal" if was_signal else "exit",
            summary=words_of_death(status, memory),
            exit_code=None if was_signal else status,
            signal=-status if was_signal else None,
            stderr_tail=tuple(self._err.tail),
            step=self._step(),
        )

    def _step(self) -> int | None:
        return self.page.read().step or None

    def records_left(self) -> Iterator[RecordsLeft]:
        """Yield the records of a dead rank that it had not written to the storage."""
        yield from (RecordsLeft(*batch) for batch in left_behind(self._leftovers.folder / COPIES))

    def kill(self) -> None:
        """Kill the rank and all of its session, at once."""
        if not self.reaped:
            kill_session(self.pid)

    def close(self) -> None:
        """Kill what is left, reap it and close every file."""
        self.kill()
        if not self.reaped:
            self._child.reap()
            self.reaped = True
        for file in (
            self._stdout,
            self._stderr,
            self._events,
            self._control,
            self._outcome,
            self.page,
        ):
            file.close()
        self._child.close()
        self._leftovers.remove()


def start_child(
    worker: str, files: RankFiles, environment: dict[str, str], launcher: Launcher
) -> Child:
    """Fork the rank from the worker's warm host, or start a fresh process where that can't
    be.
    """
    host = host_of(worker).ready() if launcher == "auto" else None
    if host is not None:
        try:
            return host.fork(files)
        except HostUnavailableError as error:
            logger.warning(
                "a rank starts as a fresh process, since the rank host failed: %s", error
            )
    return ExecChild(files, environment)


def _pipe(
    reader: contextlib.ExitStack, writer: contextlib.ExitStack
) -> tuple[IO[bytes], IO[bytes]]:
    """Open a pipe, each end for its owner to close."""
    read, write = os.pipe()
    return reader.enter_context(os.fdopen(read, "rb", 0)), writer.enter_context(
        os.fdopen(write, "wb", 0)
    )


def _read_chunk(pipe: IO[bytes]) -> bytes | None:
    """Return the next chunk, empty at the end of the pipe, None where there is nothing yet."""
    os.set_blocking(pipe.fileno(), False)
    try:
        return os.read(pipe.fileno(), CHUNK_BYTES)
    except BlockingIOError:
        return None


def words_of_death(status: int, memory: str | None) -> str:
    """Say how it ended.

    Args:
        status: the exit code, or less than 0: the signal that killed it.
        memory: what is known of it as a victim of the kernel's OOM killer.
    """
    if status >= 0:
        return f"left with exit code {status} before its function returned"
    words = f"was killed by {signal.Signals(-status).name} ({-status}) before its function returned"
    return words if memory is None else f"{words}; {memory}"
