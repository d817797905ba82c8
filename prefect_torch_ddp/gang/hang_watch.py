"""Owns the caller's watch over its gang's progress: takes the pulses that seats send, decides, gathers the stacks."""

import logging
import time
from collections.abc import Callable, Iterable

from prefect_torch_ddp.errors import GangHungError
from prefect_torch_ddp.gang.hang import Stall, find_stall
from prefect_torch_ddp.gang.hang_text import describe, summary
from prefect_torch_ddp.gang.orders import RankPulse
from prefect_torch_ddp.gang.placement import Placement
from prefect_torch_ddp.messages import NO_RANK, GangEvent, LogLine, RankStack

STACKS_TIMEOUT_S = 8.0
"""How long to wait for the stacks of a gang that hangs."""


class HangWatch:
    """Over one attempt of one gang; does nothing without a limit."""

    def __init__(self, limit_s: float | None, placement: Placement, *, from_start: bool) -> None:
        """Watch all ranks of the placement."""
        self._limit_s = limit_s
        self._from_start = from_start
        self._hosts = {place.rank: place.host for place in placement.places}
        self._ranks: dict[int, RankPulse] = {}
        self._stacks: dict[int, str] = {}
        self._suspected: tuple[int, ...] = ()
        self._heard: set[int] = set()
        self._warned: tuple[int, ...] = ()
        self.stall: Stall | None = None
        """Set once the gang hangs."""

    def take(self, pulses: Iterable[RankPulse], sink: Callable[[GangEvent], None]) -> bool:
        """Take news of some ranks; return whether the gang is now known to hang. Warns of a wait that is long and allowed."""
        for rank in pulses:
            self._ranks[rank.rank] = rank
            self._heard.add(rank.rank)
        if self._limit_s is None or self.stall is not None or len(self._ranks) < len(self._hosts):
            return False
        stall = find_stall(tuple(self._ranks.values()), self._limit_s, from_start=self._from_start)
        moved = tuple(rank.pulse.moved_ns for _, rank in sorted(self._ranks.items()))
        if stall is None:
            self._suspected = ()
        elif stall.is_hung:
            # Seen of all ranks twice, since seats send their ranks' pulses at different times.
            if self._suspected != moved:
                self._suspected, self._heard = moved, set()
            elif self._heard == self._hosts.keys():
                self.stall = stall
        elif self._warned != moved:
            self._warned = moved
            text = f"no progress for {stall.silent_s:.0f} s, which may be right: {summary(stall, self._hosts, {})}"
            sink(LogLine(NO_RANK, logging.WARNING, text))
        return self.stall is not None

    def add_stack(self, stack: RankStack) -> None:
        """Take what a rank answered."""
        self._stacks[stack.rank] = stack.text

    def lacks_stacks(self, asked_s: float) -> bool:
        """Tell whether it is worth to wait for more stacks; `asked_s` of `time.monotonic`."""
        return len(self._stacks) < len(self._hosts) and time.monotonic() - asked_s < STACKS_TIMEOUT_S

    def error(self, attempt: int) -> GangHungError:
        """Return the caller's error, with the stacks that came."""
        assert self.stall is not None
        return GangHungError(describe(self.stall, self._hosts, self._stacks), attempt)
