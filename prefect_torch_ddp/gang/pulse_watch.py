"""Owns what a seat does for the watch over its ranks' progress: reads their pulses, measures the silent ones, fetches stacks."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prefect_torch_ddp.gang.activity import Idleness, usage_of_sessions
from prefect_torch_ddp.gang.orders import RankPulse
from prefect_torch_ddp.gang.rank_process import RankProcess
from prefect_torch_ddp.messages import RankStack
from prefect_torch_ddp.pulse import LOOK_SIGNAL, Phase

READ_S = 0.1
LOOK_TIMEOUT_S = 4.0
"""How long a rank may take to write its stacks; the handler is C and needs no lock, so only a stopped rank takes longer."""
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


class PulseWatch:
    """Over the ranks of one seat, in its thread; no call waits."""

    def __init__(self, ranks: Sequence[RankProcess], limit_s: float | None) -> None:
        """Watch these; without a limit stacks are fetched all the same when they are asked for."""
        self._limit_s = limit_s
        self._ranks = [_Watched(rank, Idleness((limit_s or 0.0) / 2)) for rank in ranks]
        self._read_s = 0.0
        self._looks: list[_Look] | None = None
        self._look_ends_s = 0.0

    def pulses(self) -> tuple[RankPulse, ...] | None:
        """Return the pulses of the ranks, if it is time to look at them again."""
        now = time.monotonic()
        if now - self._read_s < READ_S:
            return None
        self._read_s = now
        alive = [watched for watched in self._ranks if not watched.process.reaped]
        if self._limit_s is not None:
            self._measure(alive, now, self._limit_s)
        return tuple(_pulse_of(watched) for watched in alive)

    def _measure(self, ranks: Sequence[_Watched], now: float, limit_s: float) -> None:
        """Take the usage of those that have been silent for half of the limit; it costs a walk through /proc."""
        due = []
        for watched in ranks:
            pulse = watched.process.page.read()
            if pulse.moved_ns != watched.moved_ns:
                watched.moved_ns = pulse.moved_ns
                watched.idleness.reset()
            silent_s = (time.monotonic_ns() - pulse.moved_ns) / 1e9
            if silent_s >= limit_s / 2 and now - watched.sampled_s >= min(max(limit_s / 20, READ_S), 5.0):
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
            self._looks = [_Look(rank.process, rank.process.page.stacks_end()) for rank in self._ranks if not rank.process.reaped]
            for look in self._looks:
                if look.process.page.read().phase is not Phase.NONE:  # before that the signal would kill it
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
                text = look.process.page.stacks(look.begin) or "it did not answer: it is stopped, or has not come to itself\n"
                yield RankStack(look.process.place.rank, text)


def _pulse_of(watched: _Watched) -> RankPulse:
    # Read again, not kept from the measuring: a rank that moved since must not look silent.
    pulse = watched.process.page.read()
    silent_s = max(0.0, (time.monotonic_ns() - pulse.moved_ns) / 1e9)
    return RankPulse(
        rank=watched.process.place.rank,
        pulse=pulse,
        silent_s=silent_s,
        idle_s=watched.idleness.idle_s(time.monotonic(), silent_s) if pulse.moved_ns == watched.moved_ns else 0.0,
        stopped=watched.idleness.stopped,
    )
