"""Owns what an agent does for the watch over its ranks' progress: reads their heartbeats,
measures the silent ones, fetches stacks.

Owns how an agent tells a rank that works from one that waits: the CPU time and the bytes of all
processes of its session.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from os import sysconf
from pathlib import Path

from prefect_torch_ddp.gang.worker.rank_process import RankProcess
from prefect_torch_ddp.protocol.agent import RankHeartbeat
from prefect_torch_ddp.protocol.events import RankStack
from prefect_torch_ddp.protocol.heartbeat import LOOK_SIGNAL, Phase

TICKS_PER_S = sysconf("SC_CLK_TCK")
ACTIVE_SHARE = 0.01
"""Of one core; below it a process is taken to wait.

A rank's own threads that wake now and then need less.
"""
ACTIVE_LEAST_S = 0.03
"""CPU times come in ticks of 10 ms, so a few of them in a short window say nothing."""
ACTIVE_BYTES_PER_S = 65_536


@dataclass(frozen=True)
class Usage:
    """What a session had used at one moment."""

    cpu_s: float = 0.0
    io_bytes: int = 0
    stopped: str = ""
    """A process of it in state T, for people."""


def usage_of_sessions(sessions: Collection[int]) -> dict[int, Usage]:
    """Add up the processes of each session, DataLoader workers included; nothing where the
    system has no /proc.
    """
    found: dict[int, Usage] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pid, name, fields = _stat(entry)
            session = int(fields[3])
            if session not in sessions:
                continue
            before = found.get(session, Usage())
            cpu_s = (
                sum(map(int, fields[11:15])) / TICKS_PER_S
            )  # its own, and that of children it has reaped
            stopped = f"process {pid} ({name})" if fields[0] == "T" else ""
            found[session] = Usage(
                before.cpu_s + cpu_s, before.io_bytes + _io_bytes(entry), before.stopped or stopped
            )
        except (OSError, ValueError):  # it ended meanwhile
            continue
    return found


def _stat(entry: Path) -> tuple[int, str, list[str]]:
    head, _, rest = (entry / "stat").read_text(errors="replace").rpartition(")")
    pid, _, name = head.partition(" (")
    return int(pid), name, rest.split()


def _io_bytes(entry: Path) -> int:
    try:
        lines = (entry / "io").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1])
        for line in lines
        if line.startswith(("rchar", "wchar", "read_bytes", "write_bytes"))
    )


class Idleness:
    """How long one rank has been idle, from usages taken now and then."""

    def __init__(self, window_s: float) -> None:
        """Judge by the usage over so long a time."""
        self._window_s = window_s
        self._samples: deque[tuple[float, Usage]] = deque()
        self._active_s: float | None = None

    def add(self, now_s: float, usage: Usage) -> None:
        """Take one more."""
        self._samples.append((now_s, usage))
        while len(self._samples) > 1 and now_s - self._samples[1][0] >= self._window_s:
            self._samples.popleft()
        first_s, first = self._samples[0]
        span_s = now_s - first_s
        cpu_s, io_bytes = usage.cpu_s - first.cpu_s, usage.io_bytes - first.io_bytes
        if cpu_s >= max(ACTIVE_SHARE * span_s, ACTIVE_LEAST_S) or (
            span_s > 0 and io_bytes >= ACTIVE_BYTES_PER_S * span_s
        ):
            self._active_s = now_s

    def reset(self) -> None:
        """Forget all: the rank has made progress."""
        self._samples.clear()
        self._active_s = None

    @property
    def stopped(self) -> str:
        """Which process is stopped, by the newest usage."""
        return self._samples[-1][1].stopped if self._samples else ""

    def idle_s(self, now_s: float, silent_s: float) -> float:
        """Return how long the rank has been idle; 0 until enough was seen.

        Args:
            now_s: of the clock that `add` is given.
            silent_s: since its last progress, which ended its activity for sure if none was
                seen since.
        """
        if not self._samples or self._samples[-1][0] - self._samples[0][0] < self._window_s / 2:
            return 0.0
        if self._active_s is None:
            return silent_s
        if self._active_s >= self._samples[-1][0]:
            return 0.0
        return min(silent_s, now_s - self._active_s)


READ_S = 0.1
LOOK_TIMEOUT_S = 4.0
"""How long a rank may take to write its stacks; the handler is C and needs no lock, so only a
stopped rank takes longer."""
LOOK_QUIET_S = 0.2
"""Stacks that don't grow for so long are whole: nothing marks their end."""


@dataclass
class _Watched:
    process: RankProcess
    idleness: Idleness
    moved_ns: int = 0
    sampled_s: float = 0.0


@dataclass
class _Look:
    """One rank's stacks on their way."""

    process: RankProcess
    begin: int
    size: int = 0
    grown_s: float = field(default_factory=time.monotonic)


class ProgressProbe:
    """Over the ranks of one agent, in its thread; no call waits."""

    def __init__(self, ranks: Sequence[RankProcess], limit_s: float | None) -> None:
        """Watch these; without a limit stacks are fetched all the same when they are asked
        for.
        """
        self._limit_s = limit_s
        self._ranks = [_Watched(rank, Idleness((limit_s or 0.0) / 2)) for rank in ranks]
        self._read_s = 0.0
        self._looks: list[_Look] | None = None
        self._look_ends_s = 0.0

    def heartbeats(self) -> tuple[RankHeartbeat, ...] | None:
        """Return the heartbeats of the ranks, if it is time to look at them again."""
        now = time.monotonic()
        if now - self._read_s < READ_S:
            return None
        self._read_s = now
        alive = [watched for watched in self._ranks if not watched.process.reaped]
        if self._limit_s is not None:
            self._measure(alive, now, self._limit_s)
        return tuple(_heartbeat_of(watched) for watched in alive)

    def _measure(self, ranks: Sequence[_Watched], now: float, limit_s: float) -> None:
        """Take the usage of those that have been silent for half of the limit; it costs a walk
        through /proc.
        """
        due = []
        for watched in ranks:
            heartbeat = watched.process.page.read()
            if heartbeat.moved_ns != watched.moved_ns:
                watched.moved_ns = heartbeat.moved_ns
                watched.idleness.reset()
            silent_s = (time.monotonic_ns() - heartbeat.moved_ns) / 1e9
            if silent_s >= limit_s / 2 and now - watched.sampled_s >= min(
                max(limit_s / 20, READ_S), 5.0
            ):
                watched.sampled_s = now
                due.append(watched)
        if due:
            usages = usage_of_sessions({watched.process.pid for watched in due})
            for watched in due:
                if watched.process.pid in usages:
                    watched.idleness.add(time.monotonic(), usages[watched.process.pid])

    def look(self) -> None:
        """Ask all ranks for their stacks, once."""
        if self._looks is None:
            self._look_ends_s = time.monotonic() + LOOK_TIMEOUT_S
            self._looks = [
                _Look(rank.process, rank.process.page.stacks_end())
                for rank in self._ranks
                if not rank.process.reaped
            ]
            for look in self._looks:
                if (
                    look.process.page.read().phase is not Phase.NONE
                ):  # before that the signal would kill it
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(look.process.pid, LOOK_SIGNAL)

    def stacks(self) -> Iterator[RankStack]:
        """Yield the stacks that are whole by now, or overdue."""
        now = time.monotonic()
        for look in list(self._looks or ()):
            size = look.process.page.stacks_end()
            if size != look.size:
                look.size, look.grown_s = size, now
            is_whole = size > look.begin and now - look.grown_s >= LOOK_QUIET_S
            if is_whole or now >= self._look_ends_s or look.process.reaped:
                assert self._looks is not None
                self._looks.remove(look)
                text = (
                    look.process.page.stacks(look.begin)
                    or "it did not answer: it is stopped, or has not come to itself\n"
                )
                yield RankStack(look.process.place.rank, text)


def _heartbeat_of(watched: _Watched) -> RankHeartbeat:
    # Read again, not kept from the measuring: a rank that moved since must not look silent.
    heartbeat = watched.process.page.read()
    silent_s = max(0.0, (time.monotonic_ns() - heartbeat.moved_ns) / 1e9)
    return RankHeartbeat(
        rank=watched.process.place.rank,
        heartbeat=heartbeat,
        silent_s=silent_s,
        idle_s=watched.idleness.idle_s(time.monotonic(), silent_s)
        if heartbeat.moved_ns == watched.moved_ns
        else 0.0,
        stopped=watched.idleness.stopped,
    )
