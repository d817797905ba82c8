"""The task that publishes a finished run: its report and its tables, as artifacts."""

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
    lost_time_s,
    read_all_records,
    surviving_records,
)
from prefect_torch_ddp.results import (
    CheckpointRef,
    DatasetReport,
    LedgerReport,
    Report,
    TrainingSummary,
    TrainReport,
)
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.report.artifacts import ArtifactWriter, key
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from prefect_torch_ddp.tasks.report.evaluation import class_table, confusion_table
from prefect_torch_ddp.tasks.report.plot import render_curves
from prefect_torch_ddp.tasks.report.report import (
    checkpoint_list,
    epoch_table,
    load_section,
    render_report,
)
from prefect_torch_ddp.tasks.report.run_record import read_run_record


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


def _put_all(writer: ArtifactWriter, report: TrainReport, whole: str) -> int:
    found = report.evaluation
    checkpoints = f"{checkpoint_list(report)}\n\n{load_section(report.training.model_uris)}"
    pages = {
        "report": (whole, ""),
        "checkpoints": (checkpoints, ": model and checkpoints"),
        "epochs": (epoch_table(report.epochs), ": mean over all samples of all ranks"),
        "class-scores": (class_table(found), ": held-out data"),
        "confusion-matrix": (confusion_table(found), ": held-out data"),
    }
    put = {name: page for name, page in pages.items() if page[0]}
    for name, (page, what) in put.items():
        writer.put("markdown", key(name), page, f"Run {report.run_id}{what}")
    return len(put)
