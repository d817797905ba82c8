"""The ranks' lines as people read them: the ranks in front, equal lines of several ranks once."""

import logging
import math
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

from prefect_torch_ddp.frames import users_stacks
from prefect_torch_ddp.protocol.events import (
    NO_RANK,
    AttemptBegan,
    GangEvent,
    LogLine,
    RankFailure,
    RankStack,
    RankStopped,
)

rank_logger = logging.getLogger("prefect_torch_ddp.ranks")

MERGE_S = 1.0
"""How long a line waits for equal ones of other ranks."""
_SHOWN = (LogLine, RankFailure, RankStack, RankStopped, AttemptBegan)
"""What the log shows after all lines that came before it."""
_OWN = "prefect_torch_ddp"
_THREAD = re.compile(r"^(?:Current t|T)hread 0x\w+ \(most recent call first\):\n")


class _Way(NamedTuple):
    """A way by which lines come in order."""

    rank: int
    is_print: bool


class LineMerger:
    """Passes events on, equal lines of several ranks within a second as one.

    The prints of one rank keep their order, and so do its records. Between the two the order isn't
    known, since a rank sends them by different ways. Whatever else the log shows, such as a
    failure, comes after all lines that came before it.
    """

    def __init__(self, pass_on: Callable[[GangEvent], None]) -> None:
        """Start with nothing waiting."""
        self.pass_on = pass_on
        self._world_size: int | None = None
        self._waiting: defaultdict[_Way, deque[tuple[float, LogLine]]] = defaultdict(deque)
        """The lines of each rank and way, with since when."""

    def take(self, event: GangEvent) -> None:
        """Take in an event, and pass on what need not wait any more."""
        if isinstance(event, LogLine) and event.rank != NO_RANK:
            way = _Way(event.rank, is_print=not event.logger)
            self._waiting[way].append((time.monotonic(), event))
            self.pass_on_due()
            return
        if isinstance(event, AttemptBegan):
            self._world_size = event.world_size
        if isinstance(event, _SHOWN):
            self.pass_on_all()
        self.pass_on_due()
        self.pass_on(event)

    def pass_on_due(self) -> None:
        """Pass on the lines that have waited long enough, or that all ranks wrote."""
        self._pass_on_until(time.monotonic() - MERGE_S)

    def pass_on_all(self) -> None:
        """Pass on every line."""
        self._pass_on_until(math.inf)

    def _pass_on_until(self, until_s: float) -> None:
        while self._waiting:
            since_s, line = min((lines[0] for lines in self._waiting.values()), key=itemgetter(0))
            ways = sorted(
                way for way, lines in self._waiting.items() if _what(lines[0][1]) == _what(line)
            )
            if since_s > until_s and len(ways) != self._world_size:
                return
            for way in ways:
                self._waiting[way].popleft()
                if not self._waiting[way]:
                    del self._waiting[way]
            ranks = tuple(way.rank for way in ways)
            self.pass_on(line if len(ranks) == 1 else replace(line, rank=ranks[0], ranks=ranks))


def _what(line: LogLine) -> tuple[int, str, str]:
    return line.level, line.logger, line.text


def log_event(event: GangEvent) -> None:
    """Log a rank's line with the rank in front."""
    if isinstance(event, RankStack):
        event = stack_line(event)
    if not isinstance(event, LogLine):
        return
    if not rank_logger.hasHandlers():
        rank_logger.addHandler(logging.StreamHandler())  # a plain script: its prints must show
    if rank_logger.level == logging.NOTSET:
        rank_logger.setLevel(logging.INFO)
    rank_logger.log(event.level, "%s", rank_text(event))


def stack_line(stack: RankStack) -> LogLine:
    """Return a rank's stacks as one record of its log."""
    stacks = users_stacks(stack.text)
    # The name of a thread tells it from others; most ranks have no other one to show.
    threads = stacks if "\n\n" in stacks else _THREAD.sub("", stacks)
    return LogLine(stack.rank, logging.ERROR, f"is at, the innermost call first:\n{threads}")


def rank_text(line: LogLine) -> str:
    """Return a rank's line as people read it: `[rank 3] text`, or `[ranks 0-7] text`.

    The name of a user's logger comes before the text; the package's own say nothing to people.
    """
    if line.rank == NO_RANK:
        return line.text
    is_own = line.logger == _OWN or line.logger.startswith(f"{_OWN}.")
    logger = f"{line.logger}: " if line.logger and not is_own else ""
    ranks = f"ranks {name_ranks(line.ranks)}" if line.ranks else f"rank {line.rank}"
    return f"[{ranks}] {logger}{line.text}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return sorted ranks as people write them: `0-7`, or `0, 3`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))  # noqa: PLR2004
        for run in runs
    )
