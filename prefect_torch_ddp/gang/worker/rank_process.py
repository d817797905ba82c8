"""One rank's process as its agent sees it: its start, its output, and its death.

All lines go to the storage, as many as people read to the run's log.
"""

import dataclasses
import logging
import os
import pickle
import re
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from prefect_torch_ddp.errors import ForkServerUnavailableError
from prefect_torch_ddp.gang.worker.child import Child, rank_environment, start_fresh
from prefect_torch_ddp.gang.worker.fork_client import fork_client
from prefect_torch_ddp.gang.worker.rank_io import RankIO
from prefect_torch_ddp.protocol.events import (
    FailureWritten,
    GangEvent,
    LogLine,
    RankEvent,
    RankFailure,
    RankReturned,
    RecordsLeft,
    decode_event,
)
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.protocol.rank import COPIES, LaunchPage, RankFiles, RankLaunch
from prefect_torch_ddp.records.log import left_behind
from prefect_torch_ddp.records.rank_log import LogFolder, RankLogWriter

logger = logging.getLogger(__name__)

LAST_CHUNKS = 64
"""Read from a dead rank's output at most; a process that left its session may write forever."""
MOST_LINES, LEAST_LINES, LINES_OF_GANG = 1_000, 100, 8_000
"""How many lines of a rank may come at once, in small gangs and in large ones."""
SHARE = 5
"""A fifth as many may follow in each period."""
PERIOD_S, LONGEST_PERIOD_S = 10.0, 300.0
"""While a flood lasts, periods become twice as long."""
LAST_LINES = 20
"""Of a flood its end is shown, where the rank may have said what it died of."""


class RankProcess:
    """A process in its own session, which runs one rank."""

    def __init__(self, launch: RankLaunch, payload: bytes, logs: LogFolder | None) -> None:
        """Start the process; raises OSError if that fails, and then leaves nothing."""
        self.place = launch.place
        rank = launch.place.rank
        writer = None if logs is None else RankLogWriter(logs, rank, launch.attempt)
        self.lines = RankLines(rank, launch.shape.world_size, writer)
        self.returned = False
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

    @property
    def is_ending(self) -> bool:
        """Whether it has failed, and still runs its exit handlers and writes its files."""
        if self.failure is None or self.child.is_dead:
            return False
        return self.io.page.read().phase is not Phase.ENDED

    def file_descriptors(self) -> Iterator[int]:
        """Yield the descriptors to wait on: output and events of the rank, and its death."""
        yield from self.io.readable()
        if self.child.death_fd is not None:
            yield self.child.death_fd

    def read(self, *, is_dead: bool = False) -> Iterator[GangEvent]:
        """Yield the rank's events and lines so far, without waiting; of a dead one the rest."""
        for lines in self.io.lines(max_chunks=LAST_CHUNKS if is_dead else 1):
            yield from self.lines.take(lines)
        for message in self.io.messages(whole=is_dead):
            try:
                event = decode_event(message, self.place.rank)
            except (ValueError, KeyError, TypeError):
                rank = self.place.rank
                logger.warning("rank %d sent a message that can't be read: %.80r", rank, message)
            else:
                yield from self._take(event)
        yield from self.lines.tell_left_out()

    def _take(self, event: RankEvent) -> Iterator[GangEvent]:
        match event:
            case LogLine():
                yield from self.lines.take([event.text], event.level, event.logger)
            case FailureWritten() | RankReturned() if self.is_settled:
                pass  # the first of them is the outcome
            case FailureWritten():
                failure = pickle.loads(self.io.outcome())
                # Who leaves has said why there, as argparse does.
                tail = self.io.stderr_tail if failure.kind == "exit" else ()
                more = {"step": self._step(), "log_uri": self.lines.uri, "stderr_tail": tail}
                self.failure = dataclasses.replace(failure, **more)
                self.lines.keep([failure.traceback_text.rstrip() or failure.summary], "ERROR ")
                yield self.failure
            case RankReturned():
                self.returned = True
                yield event
            case _:
                yield event

    def end(self) -> Iterator[GangEvent]:
        """Kill and reap the process; yield its last output, and its death if that is news."""
        self.child.kill()
        status = self.child.reap()
        # What it said last may hold its outcome, which says more than its death.
        yield from self.read(is_dead=True)
        yield from self.lines.end()
        if not self.is_settled:
            self.failure = self._death(status)
            yield self.failure

    def _death(self, status: int) -> RankFailure:
        was_signal = status < 0
        kills = oom_kills() - self._oom_kills if status == -signal.SIGKILL else 0
        return RankFailure(
            rank=self.place.rank,
            host=self.place.host,
            pid=self.child.pid,
            kind="signal" if was_signal else "exit",
            summary=words_of_death(status, kills),
            hint=hint_at_death(status, kills, self.place.host),
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


class _Limit:
    """Admits so many lines at once, and a share of them in each period that follows."""

    def __init__(self, most: int) -> None:
        self._most = self._num_left = most
        self.num_left_out = 0
        self._began_s, self._period_s = time.monotonic(), PERIOD_S

    def admit(self, num_lines: int) -> int:
        admitted = min(num_lines, self._num_left)
        self._num_left -= admitted
        self.num_left_out += num_lines - admitted
        return admitted

    def next_period(self) -> int:
        """Return how many lines the period left out that is over; 0 also if none is."""
        if (now_s := time.monotonic()) - self._began_s <= self._period_s:
            return 0
        num_left_out, self.num_left_out = self.num_left_out, 0
        self._period_s = min(2 * self._period_s, LONGEST_PERIOD_S) if num_left_out else PERIOD_S
        self._num_left = min(self._most, self._num_left + self._most // SHARE)
        self._began_s = now_s
        return num_left_out


class RankLines:
    """Passes on a rank's lines within a limit; keeps them all."""

    def __init__(self, rank: int, world_size: int, writer: RankLogWriter | None) -> None:
        """Without a writer what the limit leaves out is gone."""
        self._rank = rank
        self.writer = writer
        self.uri = writer.uri if writer is not None else ""
        """Where all lines are kept; empty if they aren't."""
        most = max(LEAST_LINES, min(MOST_LINES, LINES_OF_GANG // world_size))
        self._limit = _Limit(most)
        self._last: deque[LogLine] = deque(maxlen=LAST_LINES)
        """The newest of those left out since the last one shown."""

    def take(
        self, texts: Sequence[str], level: int = logging.INFO, logger: str = ""
    ) -> Iterator[LogLine]:
        """Take in lines; yield those for the run's log."""
        self.keep(texts, f"{logging.getLevelName(level)} {logger}: " if logger else "")
        num_admitted = self._limit.admit(len(texts))
        if num_admitted:
            self._last.clear()
        for text in texts[:num_admitted]:
            yield LogLine(self._rank, level, text, logger)
        for text in texts[num_admitted:][-LAST_LINES:]:
            self._last.append(LogLine(self._rank, level, text, logger))

    def keep(self, texts: Sequence[str], origin: str) -> None:
        """Keep lines in the storage only."""
        if self.writer is not None and texts:
            self.writer.add(texts, origin)

    def tell_left_out(self) -> Iterator[LogLine]:
        """Yield how many lines were left out, at the end of a period."""
        if num_left_out := self._limit.next_period():
            self._last.clear()
            yield self._note(num_left_out)

    def end(self) -> Iterator[LogLine]:
        """Yield how many lines were left out, and the last of them; have the rest written."""
        num_left_out = self._limit.num_left_out
        if num_left_out > len(self._last):
            yield self._note(num_left_out - len(self._last))
        yield from self._last
        if self.writer is not None:
            self.writer.end()

    def _note(self, num_left_out: int) -> LogLine:
        where = f"; all of them in {self.uri}" if self.uri else ""
        text = f"{num_left_out:,} lines left out{where}"
        return LogLine(self._rank, logging.WARNING, text)


def _start(launch: RankLaunch, files: RankFiles, environment: dict[str, str]) -> Child:
    """Fork the rank from the worker's fork server, or start a fresh process if that fails."""
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
        f"{words}, probably because memory ran out: the kernel's OOM killer reports {kills} in "
        "this Dask worker's control group since the rank started"
    )


def hint_at_death(status: int, oom_kills: int, host: str) -> str:
    """Say who may have killed a process with SIGKILL, if nothing proves it. Pure."""
    if status != -signal.SIGKILL or oom_kills > 0:
        return ""
    return (
        "who sent it isn't known: the kernel does if memory runs out "
        f"(`dmesg` on {host} shows it), and batch systems do at their limits"
    )


def oom_kills(
    membership: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the kernel's count of OOM kills in this process's control group (version 2), or 0."""
    try:
        group = re.search(r"^0::/(.*)$", membership.read_text(encoding="utf-8"), re.MULTILINE)
        # In a container whose path is the host's, the mount itself is the container's group.
        folders = [cgroups / group[1], cgroups] if group else []
        events = next(path for folder in folders if (path := folder / "memory.events").is_file())
        count = re.search(r"^oom_kill (\d+)$", events.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, StopIteration):
        return 0
    return int(count[1]) if count else 0
