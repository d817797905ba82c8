"""How far a training is, by rank 0's events: speed, time left, and the live report's text."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from prefect_torch_ddp.protocol.events import AttemptBegan, Progress
from prefect_torch_ddp.tasks.report.markdown import code, duration, fact_table, join, number, text

SPEED_WINDOW_S = 30.0
MAX_LINE_METRICS = 3


@dataclass
class TrainingProgress:
    """What is known of a running training; bounded in size, however long it runs."""

    run_id: str
    workload: str
    world_size: int
    attempt: int = 1
    status: Literal["training", "finished", "stopped"] = "training"
    newest: Progress | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest value of each, on rank 0."""
    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, step) of the events of the last half minute."""

    def begin_attempt(self, began: AttemptBegan) -> None:
        """Take in that the ranks start, perhaps again, perhaps fewer."""
        self.attempt, self.world_size = began.attempt, began.world_size

    def add(self, progress: Progress, now_s: float) -> None:
        """Take in one event; its step may be lower than the last, after a restart.

        Args:
            progress: of rank 0.
            now_s: a monotonic clock's time.
        """
        if self.newest is not None and progress.step < self.newest.step:
            self._seen.clear()  # the speed would have the restart's pause in it
        self.newest = progress
        self.metrics |= progress.metrics
        self._seen.append((now_s, progress.step))
        # Two make a speed.
        while len(self._seen) > 2 and now_s - self._seen[1][0] > SPEED_WINDOW_S:  # noqa: PLR2004
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
        """Seconds that the steps left will take; None where that can't be known."""
        if self.newest is None or self.newest.total_steps is None or self.steps_per_s is None:
            return None
        return max(0, self.newest.total_steps - self.newest.step) / self.steps_per_s

    @property
    def percent(self) -> float:
        """How much of the training is done, 0 to 100; 0 where its length isn't known."""
        if self.status == "finished":
            return 100.0
        if self.newest is None or not self.newest.total_steps:
            return 0.0
        return min(100.0, 100 * self.newest.step / self.newest.total_steps)

    @property
    def trouble(self) -> str:
        """What rank 0 warns of, such as checkpoints that fail; empty where all is well."""
        return self.newest.trouble if self.newest is not None and self.newest.trouble else ""

    @property
    def line(self) -> str:
        """One plain line: `epoch 3, step 120/400, loss 0.123, ETA 40 s`."""
        newest, status = self.newest, self.status
        if newest is None:
            return "no step yet" if status == "training" else f"{status} before the first step"
        total = f"/{newest.total_steps}" if newest.total_steps else ""
        shown = list(self.metrics.items())[:MAX_LINE_METRICS]
        metrics = [f"{' '.join(name.split())} {number(value)}" for name, value in shown]
        ending = [] if self.eta_s is None else [f"ETA {duration(self.eta_s)}"]
        ending = ending if status == "training" else [status]
        return ", ".join([f"epoch {newest.epoch}", f"step {newest.step}{total}", *metrics, *ending])


def render_live(
    training: TrainingProgress, elapsed_s: float, updated_at: str = "", curve: str = ""
) -> str:
    """Render the report of a training that runs.

    Args:
        training: what is known now.
        elapsed_s: seconds since it began.
        updated_at: when, so that a page that stands still shows since when it does.
        curve: a markdown image, or nothing.
    """
    speed = training.steps_per_s
    eta_s = training.eta_s if training.status == "training" else None
    facts = {
        "Run": code(training.run_id),
        "Workload": code(training.workload),
        "World size": f"{training.world_size} ranks",
        "Attempt": str(training.attempt),
        "Elapsed": duration(elapsed_s),
        "Updated": text(updated_at),
        "Throughput": "" if speed is None else f"{number(speed)} steps/s",
        "ETA": "" if eta_s is None else duration(eta_s),
    }
    metrics = {text(name): number(value) for name, value in training.metrics.items()}
    return join(
        f"# Training: {text(training.line)}",
        f"**{text(training.trouble)}**" if training.trouble else "",
        curve,
        fact_table(facts),
        f"## Latest metrics of rank 0\n\n{fact_table(metrics)}" if metrics else "",
    )
