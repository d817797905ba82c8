"""The curves of a run, from its records: each metric's mean over ranks and samples, by step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefect_torch_ddp.records.metrics import (
    MEASURED,
    Floats,
    Records,
    first_steps,
    means,
    rows_of,
)
from prefect_torch_ddp.records.reading import Stretch, resumed_at, superseded

Curve = Sequence[tuple[float, float]]
"""(step, value) in order of step."""

MAX_BINS = 2000
MIN_LAG_S, LAG_SHARE = 60.0, 1 / 32
"""A rank whose newest record is older than rank 0's by more, in seconds and as a share of the
training's age, reports seldom: twice what ranks hold back before they write a part."""


def _no_sums() -> Floats:
    return np.zeros((5, MAX_BINS))


@dataclass
class _Attempt:
    """What one attempt reported, in one of its stretches."""

    sums: dict[str, Floats] = field(default_factory=lambda: defaultdict(_no_sums))
    """By metric, as `Records.sums` gives them."""
    last: dict[str, tuple[int, Floats]] = field(default_factory=dict)
    """By metric: its last step, and the sums of that step's records, nan included."""
    epoch_ends: dict[int, int] = field(default_factory=dict)
    newest: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    """By rank: the step, the epoch and the time of its newest record."""
    began: float = np.inf
    """The time of its first record."""
    holes: dict[str, Floats] = field(
        default_factory=lambda: defaultdict(lambda: np.zeros(MAX_BINS))
    )
    """Of each metric, how many records of each bin are nan or infinite."""

    def add_newest(self, rows: NDArray[Any]) -> None:
        """Take in how far the records of each rank go."""
        self.began = min(self.began, float(rows["time"].min(initial=np.inf)))
        rows = rows[np.argsort(rows["step"], kind="stable")]
        for rank in np.unique(rows["rank"]).tolist():
            last = rows[rows["rank"] == rank][-1]
            newest = int(last["step"]), int(last["epoch"]), float(last["time"])
            self.newest[rank] = max(newest, self.newest.get(rank, newest))

    def position(self) -> tuple[int, int]:
        """Return the last step that a rank recorded, and its epoch."""
        step, epoch, _ = max(self.newest.values(), default=(0, 0, 0.0))
        return step, epoch

    def num_read_epochs(self) -> int:
        """Return the newest epoch of which all records are here; 0 if there is none.

        Rank 0 records in each epoch, at least what it measures: a record of a later epoch follows
        all of this one. Other ranks have to be as far, but for those that seldom report.
        """
        if 0 not in self.newest:
            return 0
        _, epoch, now = self.newest[0]
        lag_s = max(MIN_LAG_S, (now - self.began) * LAG_SHARE)
        read = min(step for step, _, time in self.newest.values() if now - time <= lag_s)
        ended = (e for e, end in self.epoch_ends.items() if e < epoch and end <= read)
        return max(ended, default=0)

    def add_last(self, name: str, records: Records, of_it: NDArray[np.bool_]) -> None:
        """Take in what the rows `of_it` say of a metric at its last step."""
        having, values = records.metrics[name]
        chosen = of_it[having]
        having, values = having[chosen], values[chosen]
        steps = records.rows["step"][having]
        if not len(steps):
            return
        step, (before, known) = int(steps.max()), self.last.get(name, (-1, np.zeros(5)))
        weights, values = records.rows["num_samples"][having][steps == step], values[steps == step]
        weights = np.maximum(weights, 0)  # some aren't known
        weighted, num = (weights * values)[weights > 0].sum(), len(values)
        sums = np.array([weighted, weights.sum(), values.sum(), num, num * step])
        if step >= before:
            self.last[name] = step, sums + known if step == before else sums


@dataclass(frozen=True)
class Curves:
    """The curves of a run at one time."""

    values: Mapping[str, Curve] = field(default_factory=dict)
    """By metric, without nan and infinite values; what ranks measured themselves comes last."""
    epoch_ends: Sequence[int] = ()
    resumes: Mapping[int, int] = field(default_factory=dict)
    """The first step of each attempt but the first."""
    holes: Mapping[str, int] = field(default_factory=dict)
    """How many records of a metric are nan or infinite, where any are."""
    last: Mapping[str, float] = field(default_factory=dict)
    """By metric that was reported: the mean over the ranks at its last step. This is the value of
    a metric wherever one is shown, and in the run record."""
    attempt: int = 0
    """The newest one; of it are:"""
    step: int = 0
    """The last that a rank recorded."""
    epoch: int = 0
    """Of that step."""
    read_epoch: int = 0
    """The newest of which all records are here; 0: there is none."""
    steps_per_point: int = 1
    """How many steps a point of `values` may be the mean of."""


class MetricCurves:
    """Builds curves from records in any order; bounded in size, however long the training.

    Steps share a bin where a curve could have more than `MAX_BINS` points. What a newer attempt
    repeated, or took back, is left out.
    """

    def __init__(self, records: Records | None = None) -> None:
        self._attempts: dict[Stretch, _Attempt] = defaultdict(_Attempt)
        self._firsts: dict[Stretch, tuple[bool, int]] = {}
        """As `first_steps` gives it."""
        self._width = 1
        if records is not None:
            self.add(records)

    def add(self, records: Records) -> None:
        """Take in records of any rank and attempt, each once."""
        while records.rows["step"].max(initial=0) // self._width >= MAX_BINS:
            self._widen()
        for stretch, first in first_steps(records).items():
            attempt = self._attempts[stretch]
            self._firsts[stretch] = min(first, self._firsts.get(stretch, first))
            of_it = rows_of(records, stretch)
            # How far the attempt is, be it no further than this, is kept in one place.
            whole = self._attempts[stretch._replace(is_start_known=True)]
            whole.add_newest(records.rows[of_it])
            steps = records.rows["step"][of_it]
            epochs, index = np.unique(records.rows["epoch"][of_it], return_inverse=True)
            ends = np.zeros(len(epochs), np.int64)
            np.maximum.at(ends, index, steps)
            for epoch, end in zip(epochs.tolist(), ends.tolist(), strict=True):
                attempt.epoch_ends[epoch] = max(end, attempt.epoch_ends.get(epoch, 0))
            bins = np.where(of_it, records.rows["step"] // self._width, -1)
            for name, (having, values) in records.metrics.items():
                attempt.sums[name] += records.sums(name, bins, MAX_BINS, only_finite=True)
                if not name.startswith(MEASURED):
                    attempt.add_last(name, records, of_it)
                if (is_hole := ~np.isfinite(values) & of_it[having]).any():
                    attempt.holes[name] += np.bincount(bins[having][is_hole], minlength=MAX_BINS)

    def snapshot(self) -> Curves:
        """Return the curves as they are now."""
        merged: dict[str, Floats] = defaultdict(_no_sums)
        holes: dict[str, int] = defaultdict(int)
        last: dict[int, int] = {}
        bin_starts = np.arange(MAX_BINS) * self._width
        firsts = dict(sorted(self._firsts.items()))
        ends = superseded(firsts)
        for stretch, end in ends.items():
            attempt = self._attempts[stretch]
            for name, sums in attempt.sums.items():
                merged[name] += np.where(bin_starts < end, sums, 0.0)
            for name, found in attempt.holes.items():
                holes[name] += int(found[bin_starts < end].sum())
            for epoch, step in attempt.epoch_ends.items():
                if step < end:
                    last[epoch] = max(step, last.get(epoch, 0))
        values: dict[str, Curve] = {}
        for name in sorted(merged, key=lambda name: name.startswith(MEASURED)):
            some = merged[name][:, merged[name][3] > 0]
            if some.size:
                points = zip((some[4] / some[3]).tolist(), means(name, some).tolist(), strict=True)
                values.setdefault(name.removeprefix(MEASURED), list(points))
        epoch_ends = [last[epoch] for epoch in sorted(last)]
        resumes = dict(list(resumed_at(firsts).items())[1:])
        num_holes = {name: num for name, num in holes.items() if num}
        reported = [name for name in merged if not name.startswith(MEASURED) and name in values]
        last_values = {name: values[name][-1][1] for name in reported} | self._last(ends)
        newest = max(self._attempts, default=Stretch(0, is_start_known=True))
        attempt = self._attempts.get(newest, _Attempt())
        step, epoch = attempt.position()
        return Curves(
            values,
            epoch_ends,
            resumes,
            num_holes,
            last_values,
            attempt=newest.attempt,
            step=step,
            epoch=epoch,
            read_epoch=attempt.num_read_epochs(),
            steps_per_point=self._width,
        )

    def _last(self, ends: Mapping[Stretch, float]) -> dict[str, float]:
        """Return the last value of each metric, without what a newer attempt took back."""
        found: dict[str, tuple[int, Floats]] = {}
        for stretch, end in ends.items():
            for name, (step, sums) in self._attempts[stretch].last.items():
                if step < end and step >= found.get(name, (0, sums))[0]:
                    found[name] = step, sums
        return {name: float(means(name, sums)) for name, (_, sums) in found.items()}

    def _widen(self) -> None:
        self._width *= 2
        for attempt in self._attempts.values():
            for name, sums in attempt.sums.items():
                wide = sums.reshape(5, MAX_BINS // 2, 2).sum(axis=2)
                attempt.sums[name] = np.hstack([wide, np.zeros_like(wide)])
            for name, found in attempt.holes.items():
                narrow = found.reshape(MAX_BINS // 2, 2).sum(axis=1)
                attempt.holes[name] = np.hstack([narrow, np.zeros_like(narrow)])
