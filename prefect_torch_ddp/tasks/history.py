"""Owns what rank 0's progress adds up to while a training runs: curves, speed, time left."""

from collections import deque
from collections.abc import Mapping

from prefect_torch_ddp.messages import Progress
from prefect_torch_ddp.tasks.curves import downsample

MAX_POINTS = 2000
SPEED_WINDOW_S = 30.0


class History:
    """Everything that was heard of one training so far; bounded in size however long it runs."""

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self.metrics: dict[str, float] = {}
        """The latest value of each."""
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.epoch_ends: list[int] = []
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, progress: Progress, now_s: float) -> None:
        """Take in one event.

        Args:
            progress: may go back, when the ranks were restarted from a checkpoint: what lies beyond is forgotten.
            now_s: a monotonic clock's time.
        """
        last = self.progress
        if last is not None and progress.step < last.step:
            self._forget(progress.step)
        elif last is not None and progress.epoch > last.epoch:
            self.epoch_ends.append(last.step)
        self.progress = progress
        self.metrics |= progress.metrics
        self._extend(progress.step, progress.metrics)
        self._seen.append((now_s, progress.step))
        while len(self._seen) > 2 and now_s - self._seen[1][0] > SPEED_WINDOW_S:  # noqa: PLR2004 - two make a speed
            self._seen.popleft()

    @property
    def steps_per_s(self) -> float | None:
        """The speed of the last half minute; None before there are two events."""
        if len(self._seen) < 2:  # noqa: PLR2004
            return None
        (start_s, start), (end_s, end) = self._seen[0], self._seen[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s and end > start else None

    @property
    def eta_s(self) -> float | None:
        """Seconds that the steps left will take; None when that can't be known."""
        if self.progress is None or self.progress.total_steps is None or self.steps_per_s is None:
            return None
        return max(0, self.progress.total_steps - self.progress.step) / self.steps_per_s

    @property
    def percent(self) -> float:
        """How much of the training is done, 0 to 100; 0 where its length isn't known."""
        if self.progress is None or not self.progress.total_steps:
            return 0.0
        return min(100.0, 100 * self.progress.step / self.progress.total_steps)

    def _extend(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            curve = self.curves.setdefault(name, [])
            if curve and curve[-1][0] == step:
                curve.pop()
            curve.append((step, value))
            if len(curve) > MAX_POINTS:
                self.curves[name] = downsample(curve, MAX_POINTS // 2)

    def _forget(self, step: int) -> None:
        """Drop what a restart does again, and the speed, which has the restart's pause in it."""
        self.curves = {name: [point for point in curve if point[0] < step] for name, curve in self.curves.items()}
        self.epoch_ends = [end for end in self.epoch_ends if end < step]
        self._seen.clear()
