"""The progress probe: reads ranks' heartbeats, measures silent ranks, fetches their stacks."""

import contextlib
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from prefect_torch_ddp.gang.worker.rank_process import RankProcess
from prefect_torch_ddp.protocol.events import RankStack
from prefect_torch_ddp.protocol.heartbeat import LOOK_SIGNAL, Phase
from prefect_torch_ddp.protocol.messages import RankHeartbeat
from prefect_torch_ddp.protocol.rank import RankOrder

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
SIGNAL_AFTER_S = 1.0
"""After how long a rank that was asked gets a signal, if it may: a thread holds its GIL."""
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

    def leave_out(self, gap_s: float) -> None:
        """Count as if the last samples had been taken so much later."""
        self._samples = deque((at_s + gap_s, usage) for at_s, usage in self._samples)
        if self._active_s is not None:
            self._active_s += gap_s

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
    left_out_s: float = 0.0
    """Since it moved: time that this process did not live through."""
    sampled_s: float = 0.0

    def leave_out(self, gap_s: float) -> None:
        self.left_out_s += gap_s
        self.idleness.leave_out(gap_s)

    def move(self, moved_ns: int) -> None:
        if moved_ns != self.moved_ns:
            self.moved_ns, self.left_out_s = moved_ns, 0.0
            self.idleness.reset()

    def heartbeat(self) -> RankHeartbeat:
        # Read again, not kept from the measuring: a rank that moved since must not look silent.
        heartbeat = self.process.io.page.read()
        has_moved = heartbeat.moved_ns != self.moved_ns
        left_out_s = 0.0 if has_moved else self.left_out_s
        is_known = heartbeat.moved_ns > 0
        silent_s = max(0.0, _since_s(heartbeat.moved_ns) - left_out_s) if is_known else 0.0
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
    may_signal: bool
    num_bytes: int = 0
    asked_s: float = field(default_factory=time.monotonic)
    grown_s: float = 0.0

    def is_whole(self, now_s: float) -> bool:
        """Whether the stacks have come and grow no more; sends the signal if they don't come."""
        if (num_bytes := self.process.io.page.stacks_bytes()) != self.num_bytes:
            self.num_bytes, self.grown_s = num_bytes, now_s
        if num_bytes or not self.may_signal or now_s - self.asked_s < SIGNAL_AFTER_S:
            return num_bytes > 0 and now_s - self.grown_s >= LOOK_QUIET_S
        self.may_signal = False
        pid = self.process.child.pid
        # Without its handler, set up when the first phase begins, the signal would kill it. A
        # debugger would stop it there.
        if self.process.io.page.read().phase is not Phase.NONE and not is_traced(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, LOOK_SIGNAL)
        return False

    def stack(self) -> RankStack:
        """Return what came, or why nothing did."""
        pid, rank = self.process.child.pid, self.process.place.rank
        traced = is_traced(pid)
        silence = "a debugger holds it" if traced else "it is stopped, or still starting"
        text = self.process.io.page.stacks() or f"it did not answer: {silence}\n"
        used = usage_of_sessions({pid}).get(pid, Usage())
        return RankStack(rank, text, used.cpu_s, used.io_bytes, traced)


class ProgressProbe:
    """Watches the ranks of one agent, in its thread; no call waits."""

    def __init__(self, ranks: Sequence[RankProcess], limit_s: float | None) -> None:
        """Watch these ranks; without a limit only stacks are fetched, on request."""
        self._limit_s = limit_s
        self._ranks = [_Watched(rank, Idleness((limit_s or 0.0) / 2)) for rank in ranks]
        self._read_s = time.monotonic()
        self._looks: list[_Look] = []

    def heartbeats(self) -> tuple[RankHeartbeat, ...] | None:
        """Return the heartbeats of the living ranks; None if it isn't time to read them again."""
        now = time.monotonic()
        if now - self._read_s < READ_S:
            return None
        # What is above that: this process was stopped, starved of its GIL, or its machine asleep,
        # and the ranks perhaps as well.
        gap_s = now - self._read_s - TURN_S
        for watched in self._ranks:
            watched.move(watched.process.io.page.read().moved_ns)
            if gap_s > 0:
                watched.leave_out(gap_s)
        self._read_s = now
        alive = [watched for watched in self._ranks if not watched.process.child.is_reaped]
        if self._limit_s is not None:
            self._measure(alive, now, self._limit_s)
        return tuple(watched.heartbeat() for watched in alive)

    def _measure(self, ranks: Sequence[_Watched], now: float, limit_s: float) -> None:
        """Take the usage of ranks silent for half the limit; it costs a walk over all processes."""
        due = []
        for watched in ranks:
            pause_s = min(max(limit_s / 20, READ_S), 5.0)
            if _since_s(watched.moved_ns) >= limit_s / 2 and now - watched.sampled_s >= pause_s:
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
            is_over = look.process.child.is_reaped or now - look.asked_s >= LOOK_TIMEOUT_S
            if is_over or look.is_whole(now):
                self._looks.remove(look)
                yield look.stack()

    def ask_for_stacks(self, *, may_signal: bool) -> None:
        """Ask all ranks for their stacks, and if allowed signal silent ones; `stacks` yields them.

        A thread of a rank answers, which has to get the GIL. The signal needs nothing of Python,
        but it cuts a system call short that the main thread is in.
        """
        alive = [watched.process for watched in self._ranks if not watched.process.child.is_reaped]
        self._looks = [_Look(process, may_signal) for process in alive]
        for process in alive:
            process.io.page.clear_stacks()
            process.io.tell(RankOrder.LOOK)


def is_traced(pid: int) -> bool:
    """Whether a debugger or a tracer is attached to a process."""
    with contextlib.suppress(OSError):  # it has ended
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        return "\nTracerPid:\t0\n" not in status
    return False


def _since_s(moved_ns: int) -> float:
    return max(0.0, (time.monotonic_ns() - moved_ns) / 1e9)
