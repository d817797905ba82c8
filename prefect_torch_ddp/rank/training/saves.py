"""When a checkpoint is due: one decision, which every save in a loop asks, and its interval.

Both are pure: `due` decides for one moment, `next_interval_s` how often time makes one due.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median_low
from typing import Literal, NamedTuple

from prefect_torch_ddp.checkpoint.gather import SaveCost
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.training.loop_progress import Moment

MIN_INTERVAL_S = 2.0
MAX_INTERVAL_S = 60.0
COST_SHARE = 0.01
"""Of the time: the most that checkpoints may cost by default."""
WRITING_SHARE = 0.5
"""Of the time: the most that the storage may be busy with checkpoints by default. Waiting for a
storage costs the training little, but not nothing: it shares the network and the disk."""
NUM_COSTS = 3
"""How many of the last saves are looked at."""

logger = logging.getLogger(__name__)


class Reason(Enum):
    """Why a checkpoint is due."""

    STOP = "all ranks stop after this step"
    REQUEST = "ctx.checkpoint asked for it"
    STEPS = "every_steps"
    EPOCHS = "every_epochs"
    TIME = "every_s"


class Pace(NamedTuple):
    """How time makes a checkpoint due."""

    since_s: float
    """When the last one began, or the loop, by the monotonic clock."""
    every_s: float


def due(
    policy: CheckpointParams,
    moment: Moment,
    now_s: float,
    asked: Reason | None = None,
    pace: Pace | None = None,
) -> Reason | None:
    """Return why a checkpoint is due at this moment of the training; None: none is.

    Args:
        policy: equal on all ranks.
        moment: where the training is.
        now_s: the monotonic clock's time.
        asked: what all ranks agreed on, or the training's own request on every rank.
        pace: None: this rank's clock doesn't decide.
    """
    if moment.is_saved:
        return None
    if asked is not None:
        return asked
    step, epoch = moment.step, moment.ended_epoch
    if policy.every_steps is not None and step > 0 and step % policy.every_steps == 0:
        return Reason.STEPS
    if policy.every_epochs and epoch is not None and epoch % policy.every_epochs == 0:
        return Reason.EPOCHS
    if pace is not None and now_s - pace.since_s >= pace.every_s:
        return Reason.TIME
    return None


def next_interval_s(last_s: float, costs: Sequence[SaveCost | None]) -> float:
    """Return the seconds between two checkpoints of which time spends at most `COST_SHARE`.

    The interval at most doubles from one save to the next: a first save is slower than the later
    ones, and a machine may be busy once.

    Args:
        last_s: the interval before.
        costs: of the last saves, the newest last; None: it failed, and the next one may too.
    """
    if not costs or costs[-1] is None:
        return min(2 * last_s, MAX_INTERVAL_S) if costs else MIN_INTERVAL_S
    known = [cost for cost in costs if cost is not None]
    spent_s = median_low(cost.stall_s + cost.cpu_s for cost in known)
    written_s = median_low(cost.written_s for cost in known)
    wanted_s = max(min(spent_s / COST_SHARE, 2 * last_s), written_s / WRITING_SHARE)
    return min(max(wanted_s, MIN_INTERVAL_S), MAX_INTERVAL_S)


@dataclass
class SaveClock:
    """The pace of one rank's checkpoints by time, which adapts to what they cost by default."""

    every_s: float | Literal["auto"] | None
    since_s: float
    interval_s: float = MIN_INTERVAL_S
    """Between two checkpoints by time, if it adapts."""
    costs: tuple[SaveCost | None, ...] = ()
    has_said: bool = False

    def pace(self, *, is_writing: bool = False) -> Pace | None:
        """Return what `due` takes; None: no checkpoint comes by time.

        By default none begins while another one `is_writing`, for which its step would wait.
        """
        if self.every_s is None or (is_writing and self.every_s == "auto"):
            return None
        return Pace(self.since_s, self.interval_s if self.every_s == "auto" else self.every_s)

    def begin(self, now_s: float) -> None:
        """Note that a save begins, or a loop."""
        self.since_s = now_s

    def note(self, cost: SaveCost | None) -> None:
        """Take in what a save cost, on rank 0; None: it failed. The writing thread calls it."""
        if self.every_s != "auto":
            return
        before_s = self.interval_s
        self.costs = (*self.costs, cost)[-NUM_COSTS:]
        self.interval_s = next_interval_s(before_s, self.costs)
        has_settled = len(self.costs) == NUM_COSTS and self.interval_s <= before_s
        if has_settled and cost is not None and not self.has_said:
            self.has_said = True
            spent_s = cost.stall_s + cost.cpu_s
            logger.info(
                "a checkpoint is written every %.3g s: it costs %.0f ms, %.2g %% of the time; "
                "checkpoint.every_s sets another interval",
                self.interval_s,
                spent_s * 1000,
                spent_s / self.interval_s * 100,
            )
