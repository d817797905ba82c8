"""Owns the caller's watch over its gang's progress: takes the heartbeats that agents send,
decides, gathers the stacks.
"""

import logging
import time
from collections.abc import Callable, Iterable

from prefect_torch_ddp.errors import GangHungError
from prefect_torch_ddp.gang.caller.hang import Stall, describe, find_stall, summary
from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.protocol.agent import RankHeartbeat
from prefect_torch_ddp.protocol.events import NO_RANK, GangEvent, LogLine, RankStack

EARLY_RETURN_S = 3.0
"""How long after a rank's end its peers' last words are waited for; ranks count their
collectives once a second."""
STACKS_TIMEOUT_S = 8.0
"""How long to wait for the stacks of a gang that hangs."""


class HangWatch:
    """Over one attempt of one gang; without a limit it only looks for ranks that wait for one
    that has ended.
    """

    def __init__(self, limit_s: float | None, placement: Placement, *, from_start: bool) -> None:
        """Watch all ranks of the placement."""
        self._limit_s = limit_s
        self._from_start = from_start
        self._hosts = {place.rank: place.host for place in placement.places}
        self._ranks: dict[int, RankHeartbeat] = {}
        self._stacks: dict[int, str] = {}
        self._suspected: tuple[int, ...] = ()
        self._heard: set[int] = set()
        self._warned: tuple[int, ...] = ()
        self._ended_s: dict[int, float] = {}
        self.stall: Stall | None = None
        """Set once the gang hangs."""
        self.early_return: int | None = None
        """A rank that is in a collective which another one, whose function is over, never
        joined."""

    @property
    def has_found(self) -> bool:
        """Whether the gang can't go on."""
        return self.stall is not None or self.early_return is not None

    def take(self, heartbeats: Iterable[RankHeartbeat], sink: Callable[[GangEvent], None]) -> bool:
        """Take news of some ranks; return whether the gang is now known to hang.

        Warns of a wait that is long and allowed.
        """
        for rank in heartbeats:
            self._ranks[rank.rank] = rank
            self._heard.add(rank.rank)
        if self.early_return is None:
            self.early_return = self._find_early_return()
        return self.early_return is not None or self._has_stalled(sink)

    def _has_stalled(self, sink: Callable[[GangEvent], None]) -> bool:
        if self._limit_s is None or self.stall is not None or len(self._ranks) < len(self._hosts):
            return False
        stall = find_stall(tuple(self._ranks.values()), self._limit_s, from_start=self._from_start)
        moved = tuple(rank.heartbeat.moved_ns for _, rank in sorted(self._ranks.items()))
        if stall is None:
            self._suspected = ()
        elif stall.is_hung:
            # Seen of all ranks twice, since agents send their ranks' heartbeats at different
            # times.
            if self._suspected != moved:
                self._suspected, self._heard = moved, set()
            elif self._heard == self._hosts.keys():
                self.stall = stall
        elif self._warned != moved:
            self._warned = moved
            text = f"no progress for {stall.silent_s:.0f} s, which may be right: {summary(stall, self._hosts, {})}"
            sink(LogLine(NO_RANK, logging.WARNING, text))
        return self.stall is not None

    def add_end(self, rank: int) -> None:
        """Take note of a rank whose function is over."""
        self._ended_s[rank] = time.monotonic()

    def _find_early_return(self) -> int | None:
        """Return a rank that waits in vain: not for long enough to be a hang, but its
        collective lacks a rank for good.
        """
        long_ago_s = time.monotonic() - EARLY_RETURN_S
        ended = [
            self._ranks[rank].heartbeat.seq
            for rank, at_s in self._ended_s.items()
            if at_s < long_ago_s and rank in self._ranks
        ]
        if not ended:
            return None
        others = (rank for rank in self._ranks.values() if rank.rank not in self._ended_s)
        return next(
            (
                rank.rank
                for rank in others
                if rank.heartbeat.seq > min(ended) and rank.silent_s > EARLY_RETURN_S
            ),
            None,
        )

    def add_stack(self, stack: RankStack) -> None:
        """Take what a rank answered."""
        self._stacks[stack.rank] = stack.text

    def lacks_stacks(self, asked_s: float) -> bool:
        """Tell whether it is worth to wait for more stacks; `asked_s` of `time.monotonic`."""
        return (
            len(self._stacks) < len(self._hosts) and time.monotonic() - asked_s < STACKS_TIMEOUT_S
        )

    def error(self, attempt: int) -> GangHungError:
        """Return the caller's error, with the stacks that came."""
        assert self.stall is not None
        return GangHungError(describe(self.stall, self._hosts, self._stacks), attempt)
