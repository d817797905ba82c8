"""A rank's lines in its agent: all go to the storage, as many as people read to the run's log."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence

from prefect_torch_ddp.protocol.events import LogLine
from prefect_torch_ddp.records.rank_log import RankLogWriter

MOST_LINES, LEAST_LINES, LINES_OF_GANG = 1_000, 100, 8_000
"""How many lines of a rank may come at once, in small gangs and in large ones."""
SHARE = 5
"""A fifth as many may follow in each period."""
PERIOD_S, LONGEST_PERIOD_S = 10.0, 300.0
"""While a flood lasts, periods become twice as long."""
LAST_LINES = 20
"""Of a flood its end is shown, where the rank may have said what it died of."""


class FloodLimit:
    """Admits so many lines at once, and a share of them in each period that follows."""

    def __init__(self, world_size: int) -> None:
        """Begin the first period."""
        self._most = max(LEAST_LINES, min(MOST_LINES, LINES_OF_GANG // world_size))
        self._num_left = self._most
        self.num_left_out = 0
        """Lines that were not admitted in this period."""
        self._period_s = PERIOD_S
        self._began_s = time.monotonic()

    def admit(self, num_lines: int) -> int:
        """Return how many of so many lines are admitted."""
        admitted = min(num_lines, self._num_left)
        self._num_left -= admitted
        self.num_left_out += num_lines - admitted
        return admitted

    def has_ended(self) -> bool:
        """Tell whether the period is over."""
        return time.monotonic() - self._began_s > self._period_s

    def begin(self) -> None:
        """Begin the next period."""
        is_flood = self.num_left_out > 0
        self._period_s = min(2 * self._period_s, LONGEST_PERIOD_S) if is_flood else PERIOD_S
        self._num_left = min(self._most, self._num_left + self._most // SHARE)
        self.num_left_out = 0
        self._began_s = time.monotonic()


class RankLines:
    """Passes on a rank's lines within limits, of warnings and of all others, and keeps them all."""

    def __init__(self, rank: int, world_size: int, writer: RankLogWriter | None) -> None:
        """Without a writer what the limits leave out is gone."""
        self._rank = rank
        self.writer = writer
        self._limits = {is_warning: FloodLimit(world_size) for is_warning in (False, True)}
        self._last: deque[LogLine] = deque(maxlen=LAST_LINES)
        """The newest of those left out since the last one shown."""

    def take(
        self,
        texts: Sequence[str],
        level: int = logging.INFO,
        logger: str = "",
        *,
        has_room: bool = True,
    ) -> Iterator[LogLine]:
        """Take in lines; yield those for the run's log, none where it `has_room` for none."""
        if not texts:
            return
        is_printed = not logger
        if self.writer is not None:
            origin = "" if is_printed else f"{logging.getLevelName(level)} {logger}: "
            self.writer.add(texts, origin)
        limit = self._limits[level >= logging.WARNING]
        if has_room:
            num_admitted = limit.admit(len(texts))
        else:
            num_admitted, limit.num_left_out = 0, limit.num_left_out + len(texts)
        if num_admitted:
            self._last.clear()
        for text in texts[:num_admitted]:
            yield LogLine(self._rank, level, text, logger)
        for text in texts[num_admitted:][-LAST_LINES:]:
            self._last.append(LogLine(self._rank, level, text, logger))

    def keep(self, text: str) -> None:
        """Keep what the run's log gets in another way: what the rank failed with."""
        if self.writer is not None:
            self.writer.add([text], "ERROR ")

    def tell_left_out(self) -> Iterator[LogLine]:
        """Yield how many lines were left out, at the end of a period."""
        for limit in self._limits.values():
            if limit.has_ended():
                if limit.num_left_out:
                    yield self._note(limit.num_left_out)
                    self._last.clear()
                limit.begin()

    def end(self) -> Iterator[LogLine]:
        """Yield how many lines were left out, and the last of them; have the rest written."""
        num_left_out = sum(limit.num_left_out for limit in self._limits.values())
        if num_left_out > len(self._last):
            yield self._note(num_left_out - len(self._last))
        yield from self._last
        self._last.clear()
        for limit in self._limits.values():
            limit.num_left_out = 0
        if self.writer is not None:
            self.writer.end()

    def _note(self, num_left_out: int) -> LogLine:
        where = f"; all of them in {self.writer.uri}" if self.writer is not None else ""
        lines = "1 line" if num_left_out == 1 else f"{num_left_out:,} lines"
        return LogLine(self._rank, logging.WARNING, f"{lines} left out{where}")
