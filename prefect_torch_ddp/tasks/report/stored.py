"""What a page shows of a run that has ended: all that the run left in its storage."""

from dataclasses import dataclass
from typing import Self

from prefect_torch_ddp.protocol.events import Progress
from prefect_torch_ddp.records.metrics import (
    Records,
    epoch_rows,
    read_new_records,
    reported,
    surviving_records,
)
from prefect_torch_ddp.records.rank_log import LogFolder
from prefect_torch_ddp.records.run_record import RunRecord, previous_run
from prefect_torch_ddp.records.timing import newest_lines
from prefect_torch_ddp.results import EpochRow, TrainReport
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.report.checkpoints import kept_checkpoints
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from prefect_torch_ddp.tasks.report.headline import RunView
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tracking.runs import goodput_so_far


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
        by_ranks = reported(records)
        epochs = epoch_rows(surviving_records(by_ranks))
        return cls(storage, run_id, records, epochs, len(by_ranks))


def finished_view(stored: StoredRun, record: RunRecord, report: TrainReport) -> RunView:
    """Return what the page of a run of train_flow shows at its end."""
    at, training = (stored.storage, stored.run_id), report.training
    steps, epochs = training.num_steps, training.num_epochs
    newest = Progress(steps, epochs, steps, total_epochs=epochs)
    return RunView(
        record,
        TrainingProgress(training.world_size, training.attempt, "finished", newest=newest),
        curves=MetricCurves(stored.records).snapshot(),
        checkpoints=kept_checkpoints(*at),
        previous=previous_run(stored.storage, record),
        report=report,
        ranks=newest_lines(*at),
        goodput=goodput_so_far(*at),
        logs=LogFolder(*at).uri,
    )
