"""How far a training is: state, position, speed and time left."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from prefect_torch_ddp.protocol.events import AttemptBegan, Progress
from prefect_torch_ddp.tasks.report.markdown import count, duration, number

SPEED_WINDOW_S = 30.0
MAX_LINE_METRICS = 2

Status = Literal["training", "trained", "finished", "failed", "cancelled"]
"""A training of train_flow is trained before it is evaluated, and finished when it is published."""


@dataclass
class TrainingProgress:
    """What is known of a running training; bounded in size, however long it runs."""

    world_size: int = 0
    """0 before the workers are known."""
    attempt: int = 1
    status: Status = "training"
    cause: str = ""
    """Why it failed or was cancelled."""
    waiting: str = ""
    """What it waits for before its ranks start."""
    newest: Progress | None = None
    checkpoint_every_s: float | None = None
    """How often time makes a checkpoint due; None: never, or none was written yet."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The last value of each: the mean over the ranks, as read from their records."""
    _seen: deque[tuple[float, int, int]] = field(default_factory=deque)
    """(time, step, samples) of the events of the last half minute."""

    def begin_attempt(self, began: AttemptBegan) -> None:
        """Take in that the ranks start, perhaps again, perhaps fewer."""
        self.attempt, self.world_size, self.waiting = began.attempt, began.world_size, ""
        self._seen.clear()  # the speed would have the restart's pause in it
        self.metrics = {}

    def read(self, last: Mapping[str, float], attempt: int) -> None:
        """Take in the last value of each metric, and the attempt that recorded them.

        While it trains, none of an earlier attempt is shown: its steps may be made again.
        """
        if attempt >= self.attempt or self.status != "training":
            self.metrics = dict(last)

    def add(self, progress: Progress, now_s: float) -> None:
        """Take in one event; its step may be lower than the last, after a restart.

        Args:
            progress: of rank 0.
            now_s: a monotonic clock's time.
        """
        if self.newest is not None and progress.step < self.newest.step:
            self._seen.clear()
        self.newest = progress
        self._seen.append((now_s, progress.step, progress.num_samples))
        # Two make a speed.
        while len(self._seen) > 2 and now_s - self._seen[1][0] > SPEED_WINDOW_S:  # noqa: PLR2004
            self._seen.popleft()

    def settle(self, step: int, epoch: int) -> None:
        """Take in where the training was at its end, by what is on record.

        The last event may be a second older, or never have come.
        """
        newest = self.newest or Progress(step, epoch, None)
        self.newest = replace(newest, step=step, epoch=epoch)

    @property
    def steps_per_s(self) -> float | None:
        """The speed of the last half minute; None before there are two events."""
        return self._speed(1)

    @property
    def samples_per_s(self) -> float | None:
        """The same in samples of all ranks; None too if these aren't known."""
        return self._speed(2)

    def _speed(self, of: int) -> float | None:
        if len(self._seen) < 2:  # noqa: PLR2004
            return None
        first, last = self._seen[0], self._seen[-1]
        took_s, done = last[0] - first[0], last[of] - first[of]
        return done / took_s if took_s > 0 and done > 0 else None

    @property
    def eta_s(self) -> float | None:
        """Seconds that the steps left will take; None if that can't be known."""
        total_steps, _ = self._totals
        if self.newest is None or total_steps is None or self.steps_per_s is None:
            return None
        return max(0, total_steps - self.newest.step) / self.steps_per_s

    @property
    def percent(self) -> float:
        """How much of the training is done, 0 to 100; 0 where its length isn't known."""
        if self.status in ("finished", "trained"):
            return 100.0
        total_steps, _ = self._totals
        if self.newest is None or not total_steps:
            return 0.0
        return min(100.0, 100 * self.newest.step / total_steps)

    @property
    def _totals(self) -> tuple[int | None, int | None]:
        """Steps and epochs of the whole training; None while they aren't known."""
        if self.newest is None or self.newest.may_continue:
            return None, None
        return self.newest.total_steps, self.newest.total_epochs

    @property
    def trouble(self) -> str:
        """What rank 0 warns of, such as checkpoints that fail; empty where all is well."""
        return "" if self.newest is None else self.newest.trouble

    @property
    def line(self) -> str:
        """One line: `epoch 3/10 · step 1,240/4,000 · loss 0.31 · 812 samples/s · 4 min left`.

        Plain text: names of metrics stand in it as they are.
        """
        if self.waiting and self.status == "training":
            return self.waiting
        if self.newest is None:
            waits = self.status == "training"
            return "no step yet" if waits else f"{self.status}, no step was reported"
        newest = self.newest
        total_steps, total_epochs = self._totals
        epochs = f"/{count(total_epochs)}" if total_epochs else ""
        steps = f"/{count(total_steps)}" if total_steps else ""
        epoch = f"epoch {count(newest.epoch)}{epochs} · " if newest.epoch else ""
        position = f"{epoch}step {count(newest.step)}{steps}"
        if self.status == "failed":
            # The title has the step in which it failed, which may be the next one.
            whole = f" of {count(total_steps)}" if total_steps else ""
            position = f"{epoch}{count(newest.step)}{whole} steps done"
        losses_first = sorted(self.metrics.items(), key=lambda each: "loss" not in each[0].lower())
        shown = losses_first[:MAX_LINE_METRICS]
        metrics = [f"{' '.join(name.split())} {number(value)}" for name, value in shown]
        return " · ".join([position, *metrics, *self._ending()])

    def _ending(self) -> list[str]:
        if self.status != "training":
            return [self.status]
        samples, steps, eta_s = self.samples_per_s, self.steps_per_s, self.eta_s
        speed = [] if steps is None else [f"{number(steps)} steps/s"]
        if samples is not None:
            form = ",.0f" if samples >= 100 else ".3g"  # noqa: PLR2004
            speed = [f"{samples:{form}} samples/s"]
        return [*speed, *([] if eta_s is None else [f"{_roughly(eta_s)} left"])]


def _roughly(seconds: float) -> str:
    """A time left: its seconds would be a promise."""
    minutes = round(seconds / 60)
    in_minutes = seconds >= 60 and minutes < 60  # noqa: PLR2004
    return f"{minutes} min" if in_minutes else duration(seconds)
