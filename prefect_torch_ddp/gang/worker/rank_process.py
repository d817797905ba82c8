"""One rank's process as its agent sees it: its start, its output, and its death."""

import dataclasses
import logging
import os
import pickle
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from prefect_torch_ddp.errors import ForkServerUnavailableError
from prefect_torch_ddp.gang.worker.child import Child, rank_environment, start_fresh
from prefect_torch_ddp.gang.worker.fork_client import fork_client
from prefect_torch_ddp.gang.worker.rank_io import RankIO
from prefect_torch_ddp.gang.worker.rank_lines import RankLines
from prefect_torch_ddp.protocol.events import (
    CheckpointCommitted,
    FailureWritten,
    FunctionEnded,
    GangEvent,
    LogLine,
    Progress,
    RankEvent,
    RankFailure,
    RankListens,
    RankReturned,
    RankStopped,
    RecordsLeft,
    decode_event,
)
from prefect_torch_ddp.protocol.rank import COPIES, LaunchPage, RankFiles, RankLaunch
from prefect_torch_ddp.records.log import left_behind
from prefect_torch_ddp.records.rank_log import LogFolder, RankLogWriter

logger = logging.getLogger(__name__)

LAST_CHUNKS = 64
"""Read from a dead rank's output at most; a process that left its session may write forever."""


class RankProcess:
    """A process in a session of its own, which runs one rank."""

    def __init__(self, launch: RankLaunch, payload: bytes, logs: LogFolder | None) -> None:
        """Start the process; raises OSError where that fails, with nothing left behind."""
        self.place = launch.place
        rank = launch.place.rank
        writer = None if logs is None else RankLogWriter(logs, rank, launch.attempt)
        self.lines = RankLines(rank, launch.shape.world_size, writer)
        self.returned = False
        self.listens = False
        """Whether its training reacts to a stop."""
        self.failure: RankFailure | None = None
        self._oom_kills = oom_kills()
        self.io = RankIO()
        try:
            environment = rank_environment(os.environ, launch)
            page = LaunchPage(launch, environment, str(Path.cwd()), str(self.io.scratch))
            page.write(self.io.launch, payload)
            files = dataclasses.replace(self.io.files, store=launch.store_fd)
            self.child = _start(launch, files, environment)
        except BaseException:
            self.io.close()
            raise
        self.io.close_rank_ends()

    @property
    def is_settled(self) -> bool:
        """Whether the rank's outcome is known."""
        return self.returned or self.failure is not None

    def file_descriptors(self) -> Iterator[int]:
        """Yield the descriptors to wait on: output and events of the rank, and its death."""
        yield from self.io.readable()
        if self.child.death_fd is not None:
            yield self.child.death_fd

    def read(
        self, *, max_chunks: int = 1, has_room: bool = True, is_dead: bool = False
    ) -> Iterator[GangEvent]:
        """Yield the rank's events and lines so far, without waiting.

        Where the caller `has_room` for no more, lines and positions are left out.
        """
        for lines in self.io.lines(max_chunks=max_chunks):
            yield from self.lines.take(lines, has_room=has_room)
        for record in self.io.records(whole=is_dead):
            try:
                event = self._take(decode_event(record, self.place.rank))
            except (ValueError, KeyError, TypeError):
                rank = self.place.rank
                logger.warning("rank %d sent a record that can't be read: %.80r", rank, record)
                continue
            if isinstance(event, LogLine):
                said = ([event.text], event.level, event.logger)
                yield from self.lines.take(*said, has_room=has_room)
            elif event is not None and (has_room or not isinstance(event, Progress)):
                yield event
        yield from self.lines.tell_left_out()

    def _take(self, event: RankEvent) -> GangEvent | None:
        match event:
            case RankListens():
                self.listens = True
            case FailureWritten() if not self.is_settled:
                failure = pickle.loads(self.io.outcome())
                self.failure = dataclasses.replace(failure, step=self._step())
                self.lines.keep([failure.traceback_text.rstrip() or failure.summary], "ERROR ")
                return self.failure
            case RankReturned() if not self.is_settled:
                self.returned = True
                return event
            case LogLine() | Progress() | CheckpointCommitted() | RankStopped() | FunctionEnded():
                return event
        return None

    def end(self) -> Iterator[GangEvent]:
        """Kill and reap the process; yield its last output, and its death if that is news."""
        self.child.kill()
        status = self.child.reap()
        # What it said last may hold its outcome, which says more than its death.
        yield from self.read(max_chunks=LAST_CHUNKS, is_dead=True)
        yield from self.lines.end()
        if not self.is_settled:
            self.failure = self._death(status)
            yield self.failure

    def _death(self, status: int) -> RankFailure:
        was_signal = status < 0
        kills = 0
        if status == -signal.SIGKILL and self._oom_kills is not None:
            kills = (oom_kills() or 0) - self._oom_kills
        return RankFailure(
            rank=self.place.rank,
            host=self.place.host,
            pid=self.child.pid,
            kind="signal" if was_signal else "exit",
            summary=words_of_death(status, kills),
            exit_code=None if was_signal else status,
            signal=-status if was_signal else None,
            stderr_tail=self.io.stderr_tail,
            step=self._step(),
        )

    def _step(self) -> int | None:
        return self.io.page.read().step or None

    def records_left(self) -> Iterator[RecordsLeft]:
        """Yield the records that a dead rank had not written to the storage."""
        yield from (RecordsLeft(*batch) for batch in left_behind(self.io.scratch / COPIES))

    def close(self) -> None:
        """Kill and reap what is left, and close every file."""
        self.child.kill()
        self.child.reap()
        self.child.close()
        self.io.close()


def _start(launch: RankLaunch, files: RankFiles, environment: dict[str, str]) -> Child:
    """Fork the rank from the worker's fork server, or start a fresh process where that fails."""
    client = fork_client(launch.place.worker)
    server = client.ready(launch.preload) if launch.launcher == "auto" else None
    if server is not None:
        try:
            return server.fork(files)
        except ForkServerUnavailableError as error:
            logger.warning("a rank starts as a fresh process, since forking it failed: %s", error)
    return start_fresh(files, environment)


def words_of_death(status: int, oom_kills: int) -> str:
    """Say how a process ended before its rank's function returned. Pure."""
    if status >= 0:
        return f"left with exit code {status} before its function returned"
    name = signal.Signals(-status).name
    words = f"was killed by {name} ({-status}) before its function returned"
    if oom_kills <= 0:
        return words
    kills = "1 kill" if oom_kills == 1 else f"{oom_kills} kills"
    return (
        f"{words}, probably for want of memory: the kernel's OOM killer reports {kills} in this "
        "Dask worker's control group since the rank started"
    )


def oom_kills(
    membership: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the kernel's count of OOM kills in this process's control group (version 2).

    None where the kernel keeps none.
    """
    try:
        group = re.search(r"^0::/(.*)$", membership.read_text(encoding="utf-8"), re.MULTILINE)
        # In a container whose path is the host's, the mount itself is the container's group.
        folders = [cgroups / group[1], cgroups] if group else []
        events = next(path for folder in folders if (path := folder / "memory.events").is_file())
        count = re.search(r"^oom_kill (\d+)$", events.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, StopIteration):
        return None
    return int(count[1]) if count else None
