"""What a tracker may be told of a run: the steps that no resume takes back any more."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from prefect_torch_ddp.checkpoint.manifest import Manifest, list_manifests
from prefect_torch_ddp.records.growing import GrowingRecords
from prefect_torch_ddp.records.metrics import Records, by_steps, surviving_records
from prefect_torch_ddp.records.run_record import RunRecord, read_run_record
from prefect_torch_ddp.storage.protocol import Storage

COMPLETED = "completed"


class Point(NamedTuple):
    """A value of a metric: the mean over the ranks at a step, as in `read_metrics(by="step")`."""

    metric: str
    step: int
    value: float
    """May be NaN or infinite."""
    time_ms: int
    """Unix time in milliseconds."""


@dataclass(frozen=True)
class Mark:
    """How far a tracker was told of a run, and of which history."""

    step: int
    """The last one; -1: of none."""
    digest: str
    """Of all points up to it."""


@dataclass(frozen=True)
class History:
    """A run's record and its metrics, a row for each step in the order of steps."""

    record: RunRecord
    steps: Records
    """Of all steps that count now."""
    end: int | None
    """The steps before it are final; None: all are, for the training has completed."""

    @property
    def mark(self) -> Mark:
        """How far a tracker may be told of it."""
        steps = self.steps.rows["step"]
        final = steps if self.end is None else steps[steps < self.end]
        return self.mark_at(int(final.max(initial=-1)))

    def mark_at(self, step: int) -> Mark:
        """Return the mark of this history at a step, final or not."""
        rows = self.steps.rows
        end = int(np.searchsorted(rows["step"], step, "right"))
        digest = hashlib.sha256()
        for name in ("step", "attempt", "time"):
            digest.update(np.ascontiguousarray(rows[name][:end]).tobytes())
        for metric in sorted(self.steps.metrics):
            having, values = self.steps.metrics[metric]
            number = int(np.searchsorted(having, end))
            if number:
                digest.update(metric.encode())
                digest.update(having[:number].astype(np.int64).tobytes())
                digest.update(np.ascontiguousarray(values[:number]).tobytes())
        return Mark(step, digest.hexdigest())

    def points(self, metric: str, after: int, up_to: int) -> Iterator[Point]:
        """Yield a metric's points from the step after `after` to the step `up_to`."""
        having, values = self.steps.metrics[metric]
        steps = self.steps.rows["step"][having]
        first, end = np.searchsorted(steps, [after, up_to], "right")
        times = self.steps.rows["time"][having[first:end]]
        columns = (steps[first:end], values[first:end], times)
        for step, value, time in zip(*(column.tolist() for column in columns), strict=True):
            yield Point(metric, step, value, int(time * 1000))


class HistoryReader:
    """Reads a run's history again and again, of its metrics only what is new each time."""

    def __init__(self, storage: Storage, run_id: str, experiment: str | None = None) -> None:
        """Make it.

        Args:
            storage: where the run is.
            run_id: which run.
            experiment: of the run, if it is known, so that no other records are listed.
        """
        self._storage, self._run_id, self._experiment = storage, run_id, experiment
        self._records = GrowingRecords(storage, run_id)

    def read(self) -> History:
        """Read what is on record of the run.

        Raises:
            InvalidParamsError: there is no record of the run.
            StorageError: the storage can't be read.
        """
        # In this order: what is before a checkpoint was written before it, by all ranks, so that
        # it is complete in records that are read later.
        record = read_run_record(self._storage, self._run_id, self._experiment)
        self._experiment = record.experiment
        end = None
        if record.state != COMPLETED:
            manifests = list_manifests(self._storage, self._run_id)
            end = max(map(_first_repeatable, manifests), default=0)
        steps = by_steps(surviving_records(self._records.read()))
        order = np.lexsort((steps.rows["attempt"], steps.rows["step"]))
        return History(record, steps.reordered(order), end)


def _first_repeatable(manifest: Manifest) -> int:
    """Return the first step of which a training that resumes here may report again.

    It is the checkpoint's own step, since what code reports between a checkpoint and the next step
    has that step too. In a loop of the user's own a checkpoint's number says nothing of the steps
    that are reported, unless `ctx.commit` was given it.
    """
    position = manifest.position
    if manifest.folder is not None:
        return manifest.step
    if position.get("in_own_loop"):
        return 0
    return manifest.step - int(position.get("num_own_numbers", 0))
