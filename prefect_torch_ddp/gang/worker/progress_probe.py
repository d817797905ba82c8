"""The progress probe: reads ranks' heartbeats, measures silent ranks, fetches their stacks."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from prefect_torch_ddp.gang.worker.rank_process import RankProcess
from prefect_torch_ddp.protocol.agent import RankHeartbeat
from prefect_torch_ddp.protocol.events import RankStack
from prefect_torch_ddp.protocol.heartbeat import LOOK_SIGNAL, Phase

ACTIVE_SHARE = 0.01
"""Of one core; a process below it waits. Threads that wake now and then need less."""
ACTIVE_LEAST_S = 0.03
"""CPU times come in ticks of 10 ms, so a few of them in a short window say nothing."""
ACTIVE_BYTES_PER_S = 65_536
READ_S = 0.1
TURN_S = 3.0
"""The most that counts between two reads, as for `gang.liveness`."""
LOOK_TIMEOUT_S = 4.0
"""How long a rank may take to write its stacks; only a stopped one takes longer."""
LOOK_QUIET_S = 0.2
"""Stacks that don't grow for this long are complete: nothing marks their end."""


@dataclass(frozen=True)
class Usage:
    """What the processes of a session have used so far."""

    cpu_s: float = 0.0
    io_bytes: int = 0
    stopped: str = ""
    """One of them that is stopped (SIGSTOP), for people."""


def usage_of_sessions(sessions: Collection[int]) -> dict[int, Usage]:
    """Add up the processes of each session, DataLoader workers included."""
    found: dict[int, Usage] = {}
    for process in psutil.process_iter():
        # It may end meanwhile; an OSError comes from getsid, the other from psutil.
        with contextlib.suppress(OSError, psutil.Error):
            session = os.getsid(process.pid)
            if session not in sessions:
                continue
            with process.oneshot():
                used = _usage_of(process)
            before = found.get(session, Usage())
            found[session] = Usage(
                before.cpu_s + used.cpu_s,
                before.io_bytes + used.io_bytes,
                before.stopped or used.stopped,
            )
    return found


def _usage_of(process: psutil.Process) -> Usage:
    cpu = process.cpu_times()
    io_bytes = 0
    with contextlib.suppress(psutil.AccessDenied):
        io = process.io_counters()
        io_bytes = io.read_chars + io.write_chars + io.read_bytes + io.write_bytes
    is_stopped = process.status() == psutil.STATUS_STOPPED
    return Usage(
        cpu.user + cpu.system + cpu.children_user + cpu.children_system,
        io_bytes,
        f"process {process.pid} ({process.name()})" if is_stopped else "",
    )


class Idleness:
    """How long one rank has been idle, from usages taken now and then."""

    def __init__(self, window_s: float) -> None:
        """Judge by the usage over this time."""
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
        uses_cpu = cpu_s >= max(ACTIVE_SHARE * span_s, ACTIVE_LEAST_S)
        if uses_cpu or (span_s > 0 and io_bytes >= ACTIVE_BYTES_PER_S * span_s):
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
        """Return how long the rank has been idle; 0 until enough was seen."""
        if not self._samples or self._samples[-1][0] - self._samples[0][0] < self._window_s / 2:
            return 0.0
        if self._active_s is None:
            return silent_s
        if self._active_s >= self._samples[-1][0]:
            return 0.0
        return min(silent_s, now_s - self._active_s)


@dataclass
class _Watched:
    process: RankProcess
    idleness: Idleness
    moved_ns: int = 0
    sampled_s: float = 0.0

    def heartbeat(self, woke_ns: int) -> RankHeartbeat:
        # Read again, not kept from the measuring: a rank that moved since must not look silent.
        heartbeat = self.process.io.page.read()
        silent_s = _since_s(max(heartbeat.moved_ns, woke_ns))
        has_moved = heartbeat.moved_ns != self.moved_ns
        return RankHeartbeat(
            rank=self.process.place.rank,
            heartbeat=heartbeat,
            silent_s=silent_s,
            idle_s=0.0 if has_moved else self.idleness.idle_s(time.monotonic(), silent_s),
            stopped=self.idleness.stopped,
        )


@dataclass
class _Look:
    """One rank's stacks on their way."""

    process: RankProcess
    begin: int
    size: int = 0
    grown_s: float = field(default_factory=time.monotonic)


class ProgressProbe:
    """Watches the ranks of one agent, in its thread; no call waits."""

    def __init__(self, ranks: Sequence[RankProcess], limit_s: float | None) -> None:
        """Watch these ranks; without a limit only stacks are fetched, on request."""
        self._limit_s = limit_s
        self._ranks = [_Watched(rank, Idleness((limit_s or 0.0) / 2)) for rank in ranks]
        self._read_s = 0.0
        self._woke_ns = time.monotonic_ns()
        self._looks: list[_Look] = []
        self._look_ends_s = 0.0

    def heartbeats(self) -> tuple[RankHeartbeat, ...] | None:
        """Return the heartbeats of the living ranks; None if it isn't time to read them again."""
        now = time.monotonic()
        if now - self._read_s < READ_S:
            return None
        if now - self._read_s > TURN_S:
            # This process was stopped, or its machine asleep, and most likely the ranks as well.
            self._woke_ns = time.monotonic_ns()
            for watched in self._ranks:
                watched.idleness.reset()
        self._read_s = now
        alive = [watched for watched in self._ranks if not watched.process.child.is_reaped]
        if self._limit_s is not None:
            self._measure(alive, now, self._limit_s)
        return tuple(watched.heartbeat(self._woke_ns) for watched in alive)

    def _measure(self, ranks: Sequence[_Watched], now: float, limit_s: float) -> None:
        """Take the usage of ranks silent for half the limit; it costs a walk over all processes."""
        due = []
        for watched in ranks:
            moved_ns = watched.process.io.page.read().moved_ns
            if moved_ns != watched.moved_ns:
                watched.moved_ns = moved_ns
                watched.idleness.reset()
            pause_s = min(max(limit_s / 20, READ_S), 5.0)
            if _since_s(moved_ns) >= limit_s / 2 and now - watched.sampled_s >= pause_s:
                watched.sampled_s = now
                due.append(watched)
        usages = usage_of_sessions({watched.process.child.pid for watched in due}) if due else {}
        for watched in due:
            if watched.process.child.pid in usages:
                watched.idleness.add(time.monotonic(), usages[watched.process.child.pid])

    def stacks(self) -> Iterator[RankStack]:
        """Yield the stacks asked for that are complete by now, or overdue."""
        now = time.monotonic()
        for look in list(self._looks):
            page = look.process.io.page
            size = page.stacks_end()
            if size != look.size:
                look.size, look.grown_s = size, now
            is_whole = size > look.begin and now - look.grown_s >= LOOK_QUIET_S
            if is_whole or now >= self._look_ends_s or look.process.child.is_reaped:
                self._looks.remove(look)
                silence = "it did not answer: it is stopped, or has not come to itself\n"
                pid, rank = look.process.child.pid, look.process.place.rank
                used = usage_of_sessions({pid}).get(pid, Usage())
                yield RankStack(rank, page.stacks(look.begin) or silence, used.cpu_s)

    def ask_for_stacks(self) -> None:
        """Ask all ranks for their stacks; `stacks` yields them."""
        self._look_ends_s = time.monotonic() + LOOK_TIMEOUT_S
        self._looks = [
            _Look(watched.process, watched.process.io.page.stacks_end())
            for watched in self._ranks
            if not watched.process.child.is_reaped
        ]
        for look in self._looks:
            # Without its handler, set up when the first phase begins, the signal would kill it.
            if look.process.io.page.read().phase is not Phase.NONE:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(look.process.child.pid, LOOK_SIGNAL)


def _since_s(moved_ns: int) -> float:
    return max(0.0, (time.monotonic_ns() - moved_ns) / 1e9)
