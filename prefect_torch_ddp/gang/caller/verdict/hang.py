"""The watch over one attempt of a gang: whether it hangs, or waits for a rank that has ended."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from prefect_torch_ddp.errors import GangHungError
from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.gang.caller.verdict.hang_text import describe, summarize
from prefect_torch_ddp.gang.caller.verdict.proof import is_in_collective, wait_in_vain
from prefect_torch_ddp.gang.caller.verdict.stall import Stall, excuse_for, find_stall, missing_by
from prefect_torch_ddp.protocol.events import NO_RANK, GangEvent, LogLine, RankStack
from prefect_torch_ddp.protocol.messages import RankHeartbeat

EARLY_RETURN_S = 3.0
"""How long after a rank's end its peers make no progress before they are looked at."""
STACKS_TIMEOUT_S = 8.0
"""How long to wait for the stacks of a gang that hangs."""


class Looks:
    """The stacks of all ranks as the newest look found them, and as the one before it did."""

    def __init__(self) -> None:
        """Start without any."""
        self.newest: dict[int, RankStack] = {}
        self.before: dict[int, RankStack] = {}

    def begin(self) -> None:
        """Keep the stacks of the newest look for comparison only: another one begins."""
        self.before, self.newest = self.newest, {}

    def add(self, stack: RankStack) -> None:
        """Take what a rank answered."""
        self.newest[stack.rank] = stack


class HangWatch:
    """Watches one attempt of a gang by the heartbeats that its agents send.

    Without a limit it only looks for ranks that wait for one whose function has ended.
    """

    def __init__(self, limit_s: float | None, placement: Placement, *, from_start: bool) -> None:
        """Watch all ranks of the placement."""
        self._limit_s = limit_s
        self._from_start = from_start
        self._hosts = {place.rank: place.host for place in placement.places}
        self._ranks: dict[int, RankHeartbeat] = {}
        self.looks = Looks()
        self._suspected: tuple[int, ...] = ()
        self._heard: set[int] = set()
        self._warned: tuple[int, ...] = ()
        self._excused: tuple[int, ...] = ()
        self._excused_until_s = 0.0
        self._ended_s: dict[int, float] = {}
        self.stall: Stall | None = None
        """Set once the gang hangs."""
        self.waits_in_vain: int | None = None
        """A rank in a collective that another one, whose function has ended, never joined: proven
        by the stacks."""

    @property
    def has_found(self) -> bool:
        """Whether the gang can't continue."""
        return self.stall is not None or self.waits_in_vain is not None

    def take(self, heartbeats: Iterable[RankHeartbeat], sink: Callable[[GangEvent], None]) -> bool:
        """Take news of some ranks; return whether the gang can't continue.

        Warns of a wait that is long and allowed.
        """
        for rank in heartbeats:
            self._ranks[rank.rank] = rank
            self._heard.add(rank.rank)
        if self._limit_s is not None and self.stall is None:
            self._look_for_stall(self._limit_s, sink)
        return self.has_found

    def _look_for_stall(self, limit_s: float, sink: Callable[[GangEvent], None]) -> None:
        if len(self._ranks) < len(self._hosts):
            return
        stall = find_stall(tuple(self._ranks.values()), limit_s, from_start=self._from_start)
        moved = self._moved()
        if stall is None:
            self._suspected = ()
        elif stall.is_hung:
            # Seen of all ranks twice: agents send their ranks' heartbeats at different times.
            if self._suspected != moved:
                self._suspected, self._heard = moved, set()
            elif self._heard == self._hosts.keys() and time.monotonic() >= self._excused_until_s:
                self.stall = stall
        elif self._warned != moved:
            self._warned = moved
            what = summarize(stall, self._hosts, {})
            text = f"no progress for {stall.silent_s:.0f} s, which may be normal: {what}"
            sink(LogLine(NO_RANK, logging.WARNING, text))

    def _moved(self) -> tuple[int, ...]:
        return tuple(rank.heartbeat.moved_ns for _, rank in sorted(self._ranks.items()))

    def add_end(self, rank: int) -> None:
        """Take note of a rank whose function has ended."""
        self._ended_s[rank] = time.monotonic()

    @property
    def suspects_vain_wait(self) -> bool:
        """Whether to look at the ranks that still run, of which none makes progress.

        That is a while after another one's end, or after the limit. Stacks prove nothing if a
        GPU may be at work while all threads wait.
        """
        long_ago_s = time.monotonic() - EARLY_RETURN_S
        has_ended = any(at_s < long_ago_s for at_s in self._ended_s.values())
        limit_s = EARLY_RETURN_S if has_ended else self._limit_s
        running = self._running()
        return (
            limit_s is not None
            and bool(running)
            and all(each.silent_s > limit_s for each in running)
            and not any(each.heartbeat.uses_gpu for each in running)
        )

    @property
    def may_wait_in_vain(self) -> bool:
        """Whether a look found all ranks that still run in a collective."""
        running = self._running()
        stacks = self.looks.newest
        found = [stacks[each.rank].text for each in running if each.rank in stacks]
        return len(found) == len(running) > 0 and all(map(is_in_collective, found))

    def judge_vain_wait(self) -> None:
        """Compare two looks, and note the wait that they prove."""
        running = [each.rank for each in self._running()]
        looks = self.looks.before, self.looks.newest
        if not (self.suspects_vain_wait and wait_in_vain(running, *looks)):
            return
        if self._ended_s:
            self.waits_in_vain = min(running)
        elif self._limit_s is not None:
            ranks = tuple(self._ranks.values())
            stall = find_stall(ranks, self._limit_s, from_start=self._from_start)
            if stall is not None:  # all wait, so none lags more than another
                behind = (*stall.behind, *stall.ahead)
                self._suspected = self._moved()
                self.stall = replace(stall, behind=behind, ahead=(), is_hung=True)

    def excuse(self) -> str:
        """Give a gang another limit if its stacks explain its silence.

        Returns why, once for each silence, or nothing.
        """
        if self.stall is None or self._limit_s is None:
            return ""
        if self._moved() != self._suspected:
            self.stall = None  # it has gone on while the stacks were asked for
            return ""
        why = excuse_for(self.stall, self.looks.newest, self._limit_s)
        if not why:
            return ""
        self.stall = None
        self._excused_until_s = time.monotonic() + self._limit_s
        is_known, self._excused = self._excused == self._suspected, self._suspected
        return "" if is_known else f"no progress, but {why}: the gang keeps running"

    def _running(self) -> list[RankHeartbeat]:
        """Return the ranks whose function hasn't ended; nothing before all were heard of."""
        if len(self._ranks) < len(self._hosts):
            return []
        return [each for rank, each in self._ranks.items() if rank not in self._ended_s]

    def lacks_stacks(self, asked_s: float) -> bool:
        """Whether to wait for more stacks; `asked_s` of `time.monotonic`."""
        is_early = time.monotonic() - asked_s < STACKS_TIMEOUT_S
        return is_early and len(self.looks.newest) < len(self._hosts)

    def error(self, attempt: int) -> GangHungError:
        """Return the caller's error, with the stacks that came."""
        assert self.stall is not None
        stacks = {rank: stack.text for rank, stack in self.looks.newest.items()}
        return GangHungError(describe(missing_by(self.stall, stacks), self._hosts, stacks), attempt)
