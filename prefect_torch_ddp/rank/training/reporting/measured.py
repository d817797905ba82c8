"""What people want to see of a training and nobody reported: learning rates and throughput."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_torch_ddp.data.sampler import BatchShare

MEASURE_INTERVAL_S = 0.5
MEASURE_SHARE = 1 / 256
"""Of a training's age: a long one is measured less often."""
MAX_RATES = 4


class Measurements:
    """Measures on rank 0, now and then; apart from the metrics, which are the user's."""

    def __init__(self, tracked: Mapping[str, Any]) -> None:
        """Take the tracked objects; the optimizers among them have learning rates."""
        self._tracked = tracked
        self.num_samples = 0
        """Of all ranks, in this attempt."""
        self._began_s = self._measured_s = time.monotonic()
        self._num_measured = 0
        self._next_s = 0.0
        self._has_steps = False

    def count(self, share: "BatchShare | None") -> None:
        """Count the samples of a step; it is time to measure at the first one.

        Its record says where the attempt resumed, and so which records of earlier ones it takes
        back, also if nothing was reported and there is nothing to measure.
        """
        if share is None:
            return
        self.num_samples += share.num_global
        if not self._has_steps:
            self._has_steps, self._next_s = True, 0.0

    def is_due(self, now_s: float) -> bool:
        """Tell whether it is time to measure."""
        return now_s >= self._next_s

    def measure(self, now_s: float) -> dict[str, dict[str, float]]:
        """Return what a record has besides metrics."""
        measured: dict[str, float] = {}
        with suppress(Exception):  # of an object of the user's, for a display
            measured.update(learning_rates(self._tracked))
        num_samples, took_s = self.num_samples - self._num_measured, now_s - self._measured_s
        if self._num_measured and num_samples and took_s > 0:
            measured["samples/s"] = num_samples / took_s
        self._num_measured, self._measured_s = self.num_samples, now_s
        self._next_s = now_s + max(MEASURE_INTERVAL_S, (now_s - self._began_s) * MEASURE_SHARE)
        return {"measured": measured}


def learning_rates(tracked: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the learning rate of each group of each optimizer, by name; never waits for a GPU.

    There are at most `MAX_RATES`; if there are more groups, the names say how many.
    """
    groups: dict[str, Any] = {
        f"{name}[{i}]" if len(item.param_groups) > 1 else name: group.get("lr")
        for name, item in tracked.items()
        if isinstance(getattr(item, "param_groups", None), list)
        for i, group in enumerate(item.param_groups)
        if isinstance(group, dict)  # an object of the user's may keep anything there
    }
    more = f" (of {len(groups)} groups)" if len(groups) > MAX_RATES else ""
    for name, given in list(groups.items())[:MAX_RATES]:
        is_number = getattr(given, "ndim", None) == 0 and str(getattr(given, "device", "")) == "cpu"
        is_here = isinstance(given, Real) or is_number
        if is_here and math.isfinite(rate := float(given)):
            yield "learning_rate" if len(groups) == 1 else f"learning_rate of {name}{more}", rate
