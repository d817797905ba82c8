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


class _Limit:
    """Admits so many lines at once, and a share of them in each period that follows."""

    def __init__(self, most: int) -> None:
        self._most = self._num_left = most
        self.num_left_out = 0
        self._began_s, self._period_s = time.monotonic(), PERIOD_S

    def admit(self, num_lines: int, *, has_room: bool) -> int:
        admitted = min(num_lines, self._num_left) if has_room else 0
        self._num_left -= admitted
        self.num_left_out += num_lines - admitted
        return admitted

    def next_period(self) -> int:
        """Return how many lines the period left out that is over; 0 also if none is."""
        if (now_s := time.monotonic()) - self._began_s <= self._period_s:
            return 0
        num_left_out, self.num_left_out = self.num_left_out, 0
        self._period_s = min(2 * self._period_s, LONGEST_PERIOD_S) if num_left_out else PERIOD_S
        self._num_left = min(self._most, self._num_left + self._most // SHARE)
        self._began_s = now_s
        return num_left_out


class RankLines:
    """Passes on a rank's lines within limits, of prints, records and warnings; keeps them all."""

    def __init__(self, rank: int, world_size: int, writer: RankLogWriter | None) -> None:
        """Without a writer what the limits leave out is gone."""
        self._rank = rank
        self.writer = writer
        most = max(LEAST_LINES, min(MOST_LINES, LINES_OF_GANG // world_size))
        self._limits = {kind: _Limit(most) for kind in ("print", "record", "warning")}
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
        self.keep(texts, f"{logging.getLevelName(level)} {logger}: " if logger else "")
        kind = "warning" if level >= logging.WARNING else "record" if logger else "print"
        limit = self._limits[kind]
        num_admitted = limit.admit(len(texts), has_room=has_room)
        if num_admitted:
            self._last.clear()
        for text in texts[:num_admitted]:
            yield LogLine(self._rank, level, text, logger)
        for text in texts[num_admitted:][-LAST_LINES:]:
            self._last.append(LogLine(self._rank, level, text, logger))

    def keep(self, texts: Sequence[str], origin: str) -> None:
        """Keep lines in the storage alone."""
        if self.writer is not None and texts:
            self.writer.add(texts, origin)

    def tell_left_out(self) -> Iterator[LogLine]:
        """Yield how many lines were left out, at the end of a period."""
        for limit in self._limits.values():
            if num_left_out := limit.next_period():
                self._last.clear()
                yield self._note(num_left_out)

    def end(self) -> Iterator[LogLine]:
        """Yield how many lines were left out, and the last of them; have the rest written."""
        num_left_out = sum(limit.num_left_out for limit in self._limits.values())
        if num_left_out > len(self._last):
            yield self._note(num_left_out - len(self._last))
        yield from self._last
        if self.writer is not None:
            self.writer.end()

    def _note(self, num_left_out: int) -> LogLine:
        where = f"; all of them in {self.writer.uri}" if self.writer is not None else ""
        text = f"{num_left_out:,} lines left out{where}"
        return LogLine(self._rank, logging.WARNING, text)
