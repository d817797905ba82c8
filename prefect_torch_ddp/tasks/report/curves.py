"""The curves of a run, from its records: each metric's mean over ranks and samples, by step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from prefect_torch_ddp.records.metrics import Record
from prefect_torch_ddp.records.parts import superseded_from

MAX_BINS = 2000


@dataclass
class _Bin:
    """Sums over the records of one metric in a few steps."""

    weighted: float = 0.0
    num_samples: int = 0
    plain: float = 0.0
    count: int = 0
    steps: int = 0

    def add(self, other: "_Bin") -> None:
        self.weighted += other.weighted
        self.num_samples += other.num_samples
        self.plain += other.plain
        self.count += other.count
        self.steps += other.steps

    @property
    def point(self) -> tuple[float, float]:
        """(step, value), weighed by samples; equally only where no record has any."""
        by_samples = self.num_samples > 0
        value = self.weighted / self.num_samples if by_samples else self.plain / self.count
        return self.steps / self.count, value


@dataclass
class _Attempt:
    """What one attempt reported."""

    first_reported: int
    first_step: int | None = None
    """The first with samples: what a resumed attempt reports before it takes nothing back."""
    bins: dict[str, dict[int, _Bin]] = field(default_factory=dict)
    """By metric and step."""
    epoch_ends: dict[int, int] = field(default_factory=dict)


class MetricCurves:
    """Builds curves from records in any order; bounded in size, however long the training.

    Steps share a bin where a curve would have more than `MAX_BINS` points. What a newer attempt
    repeated, or took back, is left out.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._attempts: dict[int, _Attempt] = {}
        self._width = 1
        self.add(records)

    def add(self, records: Iterable[Record]) -> None:
        """Take in records of any rank and attempt, each once."""
        for record in records:
            attempt = self._attempts.setdefault(record.attempt, _Attempt(record.step))
            attempt.first_reported = min(attempt.first_reported, record.step)
            if record.num_samples > 0:
                attempt.first_step = min(attempt.first_step or record.step, record.step)
            newest = attempt.epoch_ends.get(record.epoch, 0)
            attempt.epoch_ends[record.epoch] = max(newest, record.step)
            for name, value in record.metrics.items():
                weighted = value * record.num_samples if record.num_samples else 0.0
                one = _Bin(weighted, record.num_samples, value, 1, record.step)
                self._put(attempt.bins.setdefault(name, {}), record.step, one)

    @property
    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """(step, value) of each metric, in order of step; nan and inf included."""
        merged: dict[str, dict[int, _Bin]] = {}
        for attempt, end in self._counting():
            for name, bins in attempt.bins.items():
                into = merged.setdefault(name, {})
                for index, one in bins.items():
                    if index * self._width < end:
                        into.setdefault(index, _Bin()).add(one)
        return {
            name: [bins[index].point for index in sorted(bins)] for name, bins in merged.items()
        }

    @property
    def epoch_ends(self) -> list[int]:
        """The last step of each epoch."""
        last: dict[int, int] = {}
        for attempt, end in self._counting():
            for epoch, step in attempt.epoch_ends.items():
                if step < end:
                    last[epoch] = max(step, last.get(epoch, 0))
        return [last[epoch] for epoch in sorted(last)]

    def _counting(self) -> list[tuple[_Attempt, float]]:
        firsts = {
            number: one.first_step or one.first_reported for number, one in self._attempts.items()
        }
        ends = superseded_from(firsts)
        return [(self._attempts[number], ends[number]) for number in sorted(self._attempts)]

    def _put(self, bins: dict[int, _Bin], step: int, one: _Bin) -> None:
        if self._width > 1 and not math.isfinite(one.plain):
            return  # it would hide its neighbours' values
        bins.setdefault(step // self._width, _Bin()).add(one)
        if len(bins) > MAX_BINS:
            self._width *= 2
            for attempt in self._attempts.values():
                attempt.bins = {name: _halved(each) for name, each in attempt.bins.items()}


def _halved(bins: dict[int, _Bin]) -> dict[int, _Bin]:
    wider: dict[int, _Bin] = {}
    for index, one in bins.items():
        if math.isfinite(one.plain):
            wider.setdefault(index // 2, _Bin()).add(one)
    return wider
