"""The task that publishes what a run found: its page, as an artifact, and its report."""

from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.logging import get_run_logger
from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.results import (
    CheckpointRef,
    DatasetReport,
    Report,
    TrainingSummary,
    TrainReport,
)
from prefect_torch_ddp.tasks.gangs.checked_ledger import checked_ledger
from prefect_torch_ddp.tasks.report.artifacts import ArtifactWriter, put_page, put_runs, ui_url
from prefect_torch_ddp.tasks.report.page.links import Links
from prefect_torch_ddp.tasks.report.report_file import ReportFile
from prefect_torch_ddp.tasks.report.stored import StoredRun, finished_view
from prefect_torch_ddp.tasks.train_run import Run
from prefect_torch_ddp.tasks.watch.terminal import Teller
from prefect_torch_ddp.tracking.description import complete_record, draft_record


# The storage may hold credentials: no cache key is made of the inputs.
@task(name="publish", cache_policy=NO_CACHE)
# Each is another task's result, and Prefect draws the run's graph by them.
def publish(
    run: Run,
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
    params, storage, experiment = run.params, run.storage, run.experiment
    refuse_superseded(storage, training.run_id, training.attempt)
    stored = StoredRun.of(storage, training.run_id)
    report = TrainReport(
        run_id=training.run_id,
        flow_run_url=None,
        dataset=dataset,
        training=training,
        epochs=stored.epochs,
        evaluation=evaluation,
        checkpoint=checkpoint,
        ledger=checked_ledger(storage, training.run_id) if params.ledger else None,
    )
    record = complete_record(storage, training.run_id, experiment, evaluation, checkpoint)
    if record is None:
        about = {"workload": params.workload, "dataset": dataset}
        record = draft_record(params, training.run_id, experiment, storage, **about)
    view = replace(finished_view(stored, record, report), links=Links(ui_url()))
    logger, file = get_run_logger(), ReportFile(storage, view).start()
    with get_client(sync_client=True) as client:
        writer = ArtifactWriter(client, *get_task_and_flow_run_ids())
        put_page(writer, view)
        put_runs(writer, view)
    words = "published the report of %s from %d records"
    logger.info(words, training.run_id, stored.num_records)
    if trouble := file.join():
        logger.warning("the report could not be written to %s: %s", file.uri, trouble)
        return report
    return report.model_copy(update={"report_uri": file.uri})
