"""Owns how a seat tells a rank that works from one that waits: the CPU time and the bytes of all processes of its session."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from os import sysconf
from pathlib import Path

TICKS_PER_S = sysconf("SC_CLK_TCK")
ACTIVE_SHARE = 0.01
"""Of one core; below it a process is taken to wait. A rank's own threads that wake now and then need less."""
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
    """Add up the processes of each session, DataLoader workers included; nothing where the system has no /proc."""
    found: dict[int, Usage] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pid, name, fields = _stat(entry)
            session = int(fields[3])
            if session not in sessions:
                continue
            before = found.get(session, Usage())
            cpu_s = sum(map(int, fields[11:15])) / TICKS_PER_S  # its own, and that of children it has reaped
            stopped = f"process {pid} ({name})" if fields[0] == "T" else ""
            found[session] = Usage(before.cpu_s + cpu_s, before.io_bytes + _io_bytes(entry), before.stopped or stopped)
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
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar", "read_bytes", "write_bytes")))


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
        if cpu_s >= max(ACTIVE_SHARE * span_s, ACTIVE_LEAST_S) or (span_s > 0 and io_bytes >= ACTIVE_BYTES_PER_S * span_s):
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
            silent_s: since its last progress, which ended its activity for sure if none was seen since.
        """
        if not self._samples or self._samples[-1][0] - self._samples[0][0] < self._window_s / 2:
            return 0.0
        if self._active_s is None:
            return silent_s
        if self._active_s >= self._samples[-1][0]:
            return 0.0
        return min(silent_s, now_s - self._active_s)
