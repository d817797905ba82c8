"""The task that publishes what a run found, and what is published if it fails after its training.

Each is a page, as an artifact, and a report in the storage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.errors import is_superseded
from prefect_torch_ddp.records.run_record import RunRecord, find_run_record
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
from prefect_torch_ddp.tasks.report.report_file import ReportFile, last_lines
from prefect_torch_ddp.tasks.report.stored import StoredRun, ended_view, finished_view
from prefect_torch_ddp.tasks.train import draft_of
from prefect_torch_ddp.tasks.train_run import Run
from prefect_torch_ddp.tasks.watch.terminal import Teller
from prefect_torch_ddp.tracking.bus import RunEvents
from prefect_torch_ddp.tracking.description import (
    CANCELS,
    complete_record,
    end_run_record,
    state_of,
)


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
        record = draft_of(run, dataset)
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


@contextmanager
def failure_published(run: Run, *, by_task: bool = False) -> Iterator[None]:
    """Publish what ends a run outside of its training, a cancel too.

    If the task that trains has begun, it has left a page and a record of how that went.

    Args:
        run: to publish it of.
        by_task: the task publishes its failure itself, if it begins and isn't lost with its worker.
    """
    began = datetime.now(UTC)
    # An earlier task run, or an earlier try of the flow, may have ended it before.
    before = find_run_record(run.storage, run.run_id, run.experiment) if by_task else None
    try:
        yield
    except (Exception, *CANCELS) as error:
        if not is_superseded(error):
            try:
                record = find_run_record(run.storage, run.run_id, run.experiment)
                if not (by_task and record and _is_ended_by_task(record, before)):
                    _publish_failure(run, record, error, began)
            except Exception as trouble:  # noqa: BLE001 - the run fails by its own error
                get_run_logger().warning("the page can't show why the run ended: %r", trouble)
        raise


def _is_ended_by_task(record: RunRecord, before: RunRecord | None) -> bool:
    """Whether the task that trains has failed or was cancelled since `before` was read, for good.

    The clock of its host isn't compared with the flow's.
    """
    is_new = before is None or record.ended != before.ended
    return is_new and record.is_over and record.state != "completed"


def _publish_failure(
    run: Run, record: RunRecord | None, error: BaseException, began: datetime
) -> None:
    storage, run_id = run.storage, run.run_id
    has_failed = state_of(error) == "failed"
    is_tried_again = has_failed and _is_flow_tried_again()
    if record is None:
        draft = draft_of(run, run.find_dataset())
        record = draft.model_copy(update={"began": began})
    record = end_run_record(storage, record, error, is_tried_again=is_tried_again)
    cause = f"{type(error).__name__}: {error}"
    view = ended_view(StoredRun.of(storage, run_id), record, cause)
    view = replace(view, links=Links(ui_url()), is_tried_again=is_tried_again)
    file = ReportFile(storage, view).start()
    with get_client(sync_client=True) as client:
        writer = ArtifactWriter(client, *get_task_and_flow_run_ids())
        put_page(writer, view)
        put_runs(writer, view)
    kept = "" if file.join() else file.uri
    if is_tried_again:
        return
    for line in last_lines(record, view.links, kept):
        if has_failed:
            error.add_note(line)
        else:
            get_run_logger().info("%s", line)
    events = RunEvents(record)
    last = record.attempts[-1] if record.attempts else None
    at = {"attempt": last.attempt, "world_size": last.world_size} if last else {}
    events.emit_end(record, kept, step=record.num_steps, **at)
    events.flush()


def _is_flow_tried_again() -> bool:
    """Whether Prefect runs the whole flow again."""
    context = FlowRunContext.get()
    if context is None or context.flow is None or context.flow_run is None:
        return False
    return context.flow_run.run_count <= context.flow.retries
