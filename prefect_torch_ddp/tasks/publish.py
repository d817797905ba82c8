"""The task that publishes a finished run: its report and its tables, as artifacts."""

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.logging import get_run_logger
from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.protocol.events import Progress
from prefect_torch_ddp.records.ledger import read_ledger
from prefect_torch_ddp.records.metrics import (
    epoch_rows,
    read_new_records,
    reported,
    surviving_records,
)
from prefect_torch_ddp.records.rank_log import LogFolder
from prefect_torch_ddp.records.run_record import previous_run
from prefect_torch_ddp.records.timing import newest_lines
from prefect_torch_ddp.results import (
    CheckpointRef,
    DatasetReport,
    LedgerReport,
    Report,
    TrainingSummary,
    TrainReport,
)
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.reading import read_goodput
from prefect_torch_ddp.tasks.record.draft import complete_record, draft_record
from prefect_torch_ddp.tasks.report.artifacts import ArtifactWriter, key
from prefect_torch_ddp.tasks.report.checkpoints import kept_checkpoints
from prefect_torch_ddp.tasks.report.curves import MetricCurves
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.report.report import render_page
from prefect_torch_ddp.tasks.report.view import RunView
from prefect_torch_ddp.tasks.watch.terminal import Teller


# The storage may hold credentials: no cache key is made of the inputs.
@task(name="publish", cache_policy=NO_CACHE)
# Each is another task's result, and Prefect draws the run's graph by them.
def publish(  # noqa: PLR0913, PLR0917
    params: TrainParams,
    storage: Storage,
    experiment: str,
    dataset: DatasetReport,
    training: TrainingSummary,
    evaluation: Report,
    checkpoint: CheckpointRef,
) -> TrainReport:
    """Publish what a run found, as artifacts to browse, and return it.

    Raises:
        SupersededError: a newer attempt has begun.
    """
    Teller()
    refuse_superseded(storage, training.run_id, training.attempt)
    new_records = read_new_records(storage, training.run_id, set())
    all_records = reported(new_records)
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
    record = complete_record(storage, training.run_id, experiment, evaluation, checkpoint)
    if record is None:
        about = {"workload": params.workload, "dataset": dataset}
        record = draft_record(params, training.run_id, experiment, storage, **about)
    steps, epochs = training.num_steps, training.num_epochs
    newest = Progress(steps, epochs, steps, total_epochs=epochs)
    view = RunView(
        record,
        TrainingProgress(training.world_size, training.attempt, "finished", newest=newest),
        curves=MetricCurves(new_records).snapshot(),
        checkpoints=kept_checkpoints(storage, training.run_id),
        previous=previous_run(storage, record),
        report=report,
        ranks=newest_lines(storage, training.run_id),
        goodput=read_goodput(storage, training.run_id),
        logs=LogFolder(storage, training.run_id).uri,
    )
    with get_client(sync_client=True) as client:
        writer = ArtifactWriter(client, *get_task_and_flow_run_ids())
        page, title = render_page(view), f"Run {training.run_id}, finished"
        writer.put("markdown", key("report", experiment), page, title)
    words = "published the report of %s from %d records"
    get_run_logger().info(words, training.run_id, len(all_records))
    return report


def _checked_ledger(storage: Storage, run_id: str) -> LedgerReport:
    ledger = read_ledger(storage, run_id)
    if ledger.is_clean:
        words = "the ledger of %d epochs is clean: each sample that was due was trained on once"
        get_run_logger().info(words, len(ledger.epochs))
    else:
        get_run_logger().error("the ledger of run %s is not clean:\n%s", run_id, ledger)
    return ledger
