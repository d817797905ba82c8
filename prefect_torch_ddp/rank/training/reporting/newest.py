"""The newest value of each metric that a rank reported, and whether a checkpoint has the best."""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from prefect_torch_ddp.checkpoint.manifest import Reported
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.metric_names import is_validation
from prefect_torch_ddp.rank.training.numbers import CheckpointNumbers

MAX_NAMES = 20
"""Of metrics that a warning names."""

logger = logging.getLogger(__name__)


class NewestMetrics:
    """The newest value of each metric, and when it was reported."""

    def __init__(self, policy: CheckpointParams, numbers: CheckpointNumbers) -> None:
        """Start without any."""
        self._policy = policy
        self._numbers = numbers
        self._values: dict[str, Any] = {}
        self._reports: dict[str, Reported] = {}
        self._weights: dict[str, int] = {}
        self._rated: Reported | None = None
        """The best metric's report that the newest checkpoint has."""
        self._best = -math.inf
        """Of the best metric in this attempt's checkpoints; larger is better."""
        self._has_warned = self._has_missed = self._has_repeated = False

    def take(self, metrics: Mapping[str, Any], num_samples: int) -> None:
        """Take metrics that are reported now, in a step with so many samples of this rank."""
        self._values.update(metrics)
        self._weights.update({name: 0 if is_validation(name) else num_samples for name in metrics})
        self._reports.update(dict.fromkeys(metrics, self._numbers.reported_now))

    def warn_if_repeated(self, metrics: Iterable[str]) -> None:
        """Warn, once, that a loop of the user's own doesn't say its steps: all are as one step."""
        numbers = self._numbers
        if self._has_repeated or numbers.has_begun or numbers.own_progress is not None:
            return
        now = numbers.reported_now
        if again := next((name for name in metrics if self._reports.get(name) == now), None):
            self._has_repeated = True
            logger.warning(
                "%s was reported again in step %d: what is reported in one step counts as one "
                "value, the mean. In a loop without ctx.steps, call ctx.progress(step) before "
                "you report, so that each step has its own",
                again,
                numbers.record_step,
            )

    def of_checkpoint(self, *, is_rated: bool) -> tuple[dict[str, float], dict[str, Reported]]:
        """Return the values, and when each was reported; may wait for the device.

        Args:
            is_rated: whether this rank's best metric counts.
        """
        self._values = {name: float(value) for name, value in self._values.items()}
        if is_rated:
            self._rate(self._policy.best_metric or "")
        return dict(self._values), dict(self._reports)

    def weights(self) -> dict[str, int]:
        """Return what each value of this rank counts in the mean over the ranks; 0: as others."""
        return dict(self._weights)

    def has_unsaved_best(self) -> bool:
        """Tell whether no checkpoint has the newest value of the best metric."""
        report = self._reports.get(self._policy.best_metric or "")
        return report is not None and report != self._rated

    def restore(self, metrics: Mapping[str, Any], reports: Mapping[str, Reported]) -> None:
        """Start with the metrics of a checkpoint."""
        self._values, self._reports = dict(metrics), dict(reports)
        self._weights = dict.fromkeys(metrics, 0)
        self._rated = self._reports.get(self._policy.best_metric or "")

    def _rate(self, metric: str) -> None:
        """Note the best metric of a checkpoint; warn, once, if a best value is of other weights."""
        self._warn_if_missed(metric)
        if metric not in self._values or self._reports.get(metric) == self._rated:
            return
        value = self._values[metric] * (1 if self._policy.best_is == "max" else -1)
        self._rated = self._reports[metric]
        if not value > self._best:  # nor if it is a nan
            return
        self._best = value
        step, now = self._rated.step, self._numbers.step_done
        # At 0 it is a baseline of untrained weights, which nobody wants, or of a loop that doesn't
        # say its steps by `ctx.progress`: what it commits may well be what it has validated.
        if 0 < step < now and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s was reported in step %d, but the next checkpoint is of step %d: it is ranked "
                "by that value, although its weights aren't the validated ones. To keep those, "
                "request a checkpoint when you report the metric: "
                "ctx.checkpoint(force=True), or in the loop ctx.checkpoint(force=ctx.epoch_ended)",
                metric,
                step,
                now,
            )

    def _warn_if_missed(self, metric: str) -> None:
        """Warn, once, that the best metric may have another name: others are validated already."""
        is_missed = metric and metric not in self._values and any(map(is_validation, self._values))
        if is_missed and not self._has_missed:
            self._has_missed = True
            logger.warning(
                "checkpoint.best_metric is %r, which rank 0 hasn't reported yet; it has reported "
                "%s: no checkpoint is kept as the best before it is reported",
                metric,
                ", ".join(list(self._values)[:MAX_NAMES]),
            )
