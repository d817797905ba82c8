"""Owns the measure of silence between processes: who hears nothing for this long takes the
other for lost.
"""

import time
from collections.abc import Callable

LIVENESS_TIMEOUT_S = 12.0
"""For callers, agents, workers and the scheduler. A rank waits two seconds longer for its agent
(`rank/link.py`), so that the caller names the silent worker before that worker's ranks end
themselves and their peers fail."""
TURN_S = 3.0
"""The most that counts between two looks: longer, and this process was itself stopped, or its
machine was asleep."""


class Liveness:
    """How long nothing was heard, as far as this process lived through it."""

    def __init__(
        self, limit_s: float = LIVENESS_TIMEOUT_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with nothing missed."""
        self._limit_s = limit_s
        self._now = now
        self._looked_s = now()
        self._lasted_s = 0.0

    def heard(self) -> None:
        """Note a sign of life."""
        self._looked_s = self._now()
        self._lasted_s = 0.0

    @property
    def left_s(self) -> float:
        """How much longer it may last; counts the time since the last look."""
        now = self._now()
        self._lasted_s += min(now - self._looked_s, TURN_S)
        self._looked_s = now
        return max(0.0, self._limit_s - self._lasted_s)
