"""What a page shows of what a run left in its storage: read once at its end, or as it trains."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from prefect_torch_ddp.checkpoint.manifest import checkpoint_ref, list_manifests
from prefect_torch_ddp.protocol.events import Progress
from prefect_torch_ddp.records.metrics import (
    Records,
    epoch_rows,
    read_new_records,
    reported,
    surviving_records,
)
from prefect_torch_ddp.records.rank_log import LogFolder
from prefect_torch_ddp.records.run_record import RunRecord, newest_runs, previous_run
from prefect_torch_ddp.records.timing import newest_lines
from prefect_torch_ddp.results import EpochRow, TrainReport
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.report.curves import Curves, MetricCurves
from prefect_torch_ddp.tasks.report.page.checkpoints import KeptCheckpoint
from prefect_torch_ddp.tasks.report.page.headline import RunView
from prefect_torch_ddp.tasks.report.page.ranks import RecentTimes
from prefect_torch_ddp.tasks.report.progress import Status, TrainingProgress
from prefect_torch_ddp.tracking.runs import goodput_so_far

LOOK_INTERVAL_S = 20.0
"""Between two looks at checkpoints, claims and failures, each an object to read."""
MAX_RECORDS = 500_000
"""That are read once more at the end, for the epochs: a second's work."""
TOO_MANY = (
    "The epochs are left out: the training has more than {:,} records. `read_metrics` has them."
)
MAX_EARLIER = 100
"""Runs of an experiment among which the best one is looked for."""
READ_SHARE = 1 / 64
"""Records are read again after this share of the training's age: as often as ranks write them."""


@dataclass(frozen=True)
class StoredRun:
    """The records of a run that has ended, read once."""

    storage: Storage
    run_id: str
    records: Records
    """All of them, with what ranks measured themselves."""
    epochs: tuple[EpochRow, ...]
    num_records: int
    """How many the ranks reported, superseded ones included."""

    @classmethod
    def of(cls, storage: Storage, run_id: str) -> Self:
        """Read them."""
        records = read_new_records(storage, run_id, set())
        epochs = epoch_rows(surviving_records(records))
        return cls(storage, run_id, records, epochs, len(reported(records)))


def finished_view(stored: StoredRun, record: RunRecord, report: TrainReport) -> RunView:
    """Return what the page of a run of train_flow shows at its end."""
    training = report.training
    steps, epochs = training.num_steps, training.num_epochs
    newest = Progress(steps, epochs, steps, total_epochs=epochs)
    shown = TrainingProgress(training.world_size, training.attempt, "finished", newest=newest)
    return replace(_view(stored, record, shown), train_report=report)


def ended_view(stored: StoredRun, record: RunRecord, cause: str) -> RunView:
    """Return what the page of a run of train_flow shows that failed or was cancelled."""
    last = record.attempts[-1] if record.attempts else None
    status: Status = "failed" if record.state == "failed" else "cancelled"
    world_size, attempt = (last.world_size, last.attempt) if last else (0, 1)
    shown = TrainingProgress(world_size, attempt, status, cause)
    view = _view(stored, record, shown)
    steps, epochs = record.num_steps or 0, record.num_epochs or 0
    if record.has_trained:
        shown.newest = Progress(steps, epochs, steps, total_epochs=epochs)
    elif view.curves.step:
        shown.settle(view.curves.step, view.curves.epoch)
    return view


def _view(stored: StoredRun, record: RunRecord, shown: TrainingProgress) -> RunView:
    at = stored.storage, stored.run_id
    curves = MetricCurves(stored.records).snapshot()
    shown.metrics = dict(curves.last)
    return RunView(
        record,
        shown,
        curves=curves,
        checkpoints=kept_checkpoints(*at),
        previous=previous_run(stored.storage, record),
        earlier=earlier_runs(stored.storage, record),
        epochs=stored.epochs,
        ranks=newest_lines(*at),
        goodput=goodput_so_far(*at),
        logs=LogFolder(*at).uri,
    )


class Readings:
    """What a run that trains has in its storage, read again and again; used by one thread."""

    def __init__(self, storage: Storage, interval_s: float) -> None:
        """Read nothing yet.

        Args:
            storage: of the run.
            interval_s: the least time between two readings.
        """
        self.curves = Curves()
        self._storage = storage
        self._interval_s = interval_s
        self._known: set[str] = set()
        """The parts of the run's records that are in the curves."""
        self._built = MetricCurves()
        self._recent = RecentTimes()
        self._num_records = 0
        self._next_read_s = self._next_look_s = 0.0
        self._began_s = time.monotonic()

    def due(
        self, record: RunRecord, *, is_last: bool, has_previous: bool, needs_epochs: bool
    ) -> Mapping[str, Callable[[], Any]]:
        """Return what is to be read now, by the names of RunView; nothing before it is due.

        Args:
            record: of the run.
            is_last: the training has ended: all is read, and the ranks' times are those of all.
            has_previous: the runs to compare with are known.
            needs_epochs: the rows of the epochs are shown, at the end.
        """
        age_s = time.monotonic() - self._began_s
        if age_s < self._next_read_s and not is_last:
            return {}
        self._next_read_s = age_s + max(self._interval_s, age_s * READ_SHARE)
        at = self._storage, record.run_id
        due: dict[str, Callable[[], Any]] = {
            "curves": lambda: self._read_curves(record.run_id),
            "ranks": lambda: newest_lines(*at) if is_last else self._recent.add(newest_lines(*at)),
        }
        if is_last or age_s >= self._next_look_s:
            self._next_look_s = age_s + max(LOOK_INTERVAL_S, age_s * READ_SHARE)
            due["goodput"] = lambda: goodput_so_far(*at)
            due["checkpoints"] = lambda: kept_checkpoints(*at)
        if is_last and needs_epochs:
            if self._num_records < MAX_RECORDS:
                due["epochs"] = lambda: epoch_rows(surviving_records(read_new_records(*at, set())))
            else:
                due["without_epochs"] = lambda: TOO_MANY.format(MAX_RECORDS)
        if not has_previous:
            due["previous"] = lambda: previous_run(self._storage, record)
            due["earlier"] = lambda: earlier_runs(self._storage, record)
        return due

    def _read_curves(self, run_id: str) -> Curves:
        records = read_new_records(self._storage, run_id, self._known)
        if records:
            self._num_records += len(records)
            self._built.add(records)
            self.curves = self._built.snapshot()
        return self.curves


def earlier_runs(storage: Storage, record: RunRecord) -> list[RunRecord]:
    """Return the newest other runs of a run's experiment, newest first."""
    newest = newest_runs(storage, record.experiment, MAX_EARLIER + 1)
    return [each for each in newest if each.run_id != record.run_id][:MAX_EARLIER]


def kept_checkpoints(storage: Storage, run_id: str) -> list[KeptCheckpoint]:
    """Return a run's checkpoints, by step."""
    return [
        KeptCheckpoint(
            checkpoint_ref(storage, manifest),
            sum(item.num_bytes for item in manifest.objects),
            manifest.sha256,
        )
        for manifest in list_manifests(storage, run_id)
    ]
