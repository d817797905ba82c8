"""The task that publishes a finished run: its report and its tables, as artifacts."""

import math
from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.logging import get_run_logger
from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.records.ledger import read_ledger
from prefect_torch_ddp.records.metrics import (
    epoch_rows,
    is_validation,
    lost_time_s,
    read_all_records,
    surviving_records,
)
from prefect_torch_ddp.results import (
    CheckpointRef,
    DatasetReport,
    EpochRow,
    LedgerReport,
    Report,
    TrainingSummary,
    TrainReport,
)
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.report.artifacts import ArtifactWriter, key
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from prefect_torch_ddp.tasks.report.markdown import number
from prefect_torch_ddp.tasks.report.plot import render_curves
from prefect_torch_ddp.tasks.report.report import confusion_table, render_report
from prefect_torch_ddp.tasks.report.run_record import read_run_record
from prefect_torch_ddp.tasks.report.sections import checkpoint_list, load_section

MAX_TABLE_COLUMNS = 5


# The storage may hold credentials: no cache key is made of the inputs.
@task(name="publish", cache_policy=NO_CACHE)
# Each is another task's result, and Prefect draws the run's graph by them.
def publish(  # noqa: PLR0913, PLR0917
    params: TrainParams,
    storage: Storage,
    dataset: DatasetReport,
    training: TrainingSummary,
    evaluation: Report,
    checkpoint: CheckpointRef,
) -> TrainReport:
    """Publish what a run found, as artifacts to browse, and return it.

    Raises:
        SupersededError: a newer attempt has begun.
    """
    refuse_superseded(storage, training.run_id, training.attempt)
    all_records = read_all_records(storage, training.run_id)
    records = surviving_records(all_records)
    report = TrainReport(
        run_id=training.run_id,
        flow_run_url=None,
        dataset=dataset,
        training=training,
        epochs=epoch_rows(records),
        evaluation=evaluation,
        checkpoint=checkpoint,
        ledger=_checked_ledger(storage, training.run_id) if params.ledger else None,
    )
    curves = MetricCurves(records)
    curve = render_curves(curves.curves, curves.epoch_ends)
    whole = render_report(report, params, read_run_record(), curve, lost_time_s(all_records))
    with get_client(sync_client=True) as client:
        writer = ArtifactWriter(client, *get_task_and_flow_run_ids())
        num_artifacts = _put_all(writer, report, whole)
    words = "published %d artifacts from %d records of %s"
    get_run_logger().info(words, num_artifacts, len(all_records), training.run_id)
    return report


def _checked_ledger(storage: Storage, run_id: str) -> LedgerReport:
    ledger = read_ledger(storage, run_id)
    if ledger.is_clean:
        words = "the ledger of %d epochs is clean: each sample that was due was trained on once"
        get_run_logger().info(words, len(ledger.epochs))
    else:
        get_run_logger().error("the ledger of run %s is not clean:\n%s", run_id, ledger)
    return ledger


def epoch_cells(epochs: Sequence[EpochRow]) -> list[dict[str, Any]]:
    """Return the epoch table's rows: epoch and up to four metrics, loss and validation first."""
    names = list(dict.fromkeys(name for row in epochs for name in row.metrics))
    names.sort(key=lambda name: (name != "loss", not is_validation(name)))
    return [
        {"epoch": row.epoch}
        | {name: _cell(row.metrics.get(name)) for name in names[: MAX_TABLE_COLUMNS - 1]}
        for row in epochs
    ]


def class_cells(evaluation: Report) -> list[dict[str, Any]]:
    """Return the class table's rows."""
    return [
        {
            "class": score.name,
            "precision": _cell(score.precision),
            "recall": _cell(score.recall),
            "F1": _cell(score.f1),
            "support": score.support,
        }
        for score in evaluation.classes
    ]


def _put_all(writer: ArtifactWriter, report: TrainReport, whole: str) -> int:
    found = report.evaluation
    checkpoints = f"{checkpoint_list(report)}\n\n{load_section(report.training.model_uris)}"
    texts = [
        ("report", whole, ""),
        ("checkpoints", f"# Checkpoints\n\n{checkpoints}\n", ": model and checkpoints"),
    ]
    if found.confusion_matrix:
        matrix = f"# Confusion matrix\n\n{confusion_table(found)}\n"
        texts.append(("confusion-matrix", matrix, ": held-out data"))
    tables = [
        ("epochs", epoch_cells(report.epochs), ": mean over all samples of all ranks"),
        ("class-scores", class_cells(found), ": held-out data"),
    ]
    tables = [table for table in tables if table[1]]
    for name, text, what in texts:
        writer.put("markdown", key(name), text, f"Run {report.run_id}{what}")
    for name, rows, what in tables:
        writer.put_table(key(name), rows, f"Run {report.run_id}{what}")
    return len(texts) + len(tables)


def _cell(value: float | None) -> float | str:
    # Four digits that matter; what isn't finite becomes a word: as a number it crashes the page.
    if value is None:
        return ""
    return float(number(value)) if math.isfinite(value) else number(value)
