"""The task that trains: a gang of ranks under supervision, which a retry resumes.

And `gang_report`, which shows a gang that a flow or task of one's own runs as a task's is shown.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger
from prefect.utilities.context import get_task_and_flow_run_ids

from prefect_torch_ddp.blocks import resolve_storage
from prefect_torch_ddp.checkpoint.attempts import newest_attempt, read_failures
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.policy import Action, TaskFailure, decide
from prefect_torch_ddp.gang.run import run_gang
from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.results import DatasetReport, FailedAttempt, TrainingSummary
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.cluster import current_client, wait_for_earlier
from prefect_torch_ddp.tasks.report.live import LiveReport
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.run import RUN_STAGE, Run, run_id_of
from prefect_torch_ddp.tasks.watch.cancel import or_cancelled
from prefect_torch_ddp.tasks.watch.run_log import log_to_run
from prefect_torch_ddp.tasks.watch.terminal import display_here
from prefect_torch_ddp.tasks.workload import path_of
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from prefect_torch_ddp.tracking.description import draft_record, experiment_of, plain_values
from prefect_torch_ddp.tracking.finished import finished_training, record_finished
from prefect_torch_ddp.tracking.recorder import RunRecorder
from prefect_torch_ddp.tracking.resume import weights_from


def is_worth_a_retry(_task: Task[Any, Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Tell Prefect, which asks only if retries are left, whether another attempt may end better."""
    error: Any = state.result(raise_on_failure=False)
    return decide(TaskFailure(error), None, left=1).action is Action.RESTART


def failed_attempts(run: Run) -> tuple[FailedAttempt, ...]:
    """Return the run's attempts that failed, without those that moved or grew.

    Those whose own Dask worker died left no record.
    """
    failed = (each for each in read_failures(run.storage, run.run_id) if not each.is_move)
    return tuple(FailedAttempt.model_validate(each, from_attributes=True) for each in failed)


def _cache_key(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
    # A flow run that is retried finds its finished training again.
    run: Run = parameters["run"]
    return f"train-ddp/train/{run.storage.uri}/{run.run_id}"


@task(
    name="train",
    cache_key_fn=_cache_key,
    persist_result=True,
    result_serializer="json",
    retry_condition_fn=is_worth_a_retry,
)
def train(run: Run, dataset: DatasetReport) -> TrainingSummary:
    """Train on a gang, from the newest complete checkpoint where there is one."""
    return or_cancelled(_train, run, dataset)


def _train(run: Run, dataset: DatasetReport) -> TrainingSummary:
    done = finished_training(run.storage, run.run_id)
    if done is not None:
        words = "the training has finished already, in attempt %d: it is not run again"
        get_run_logger().info(words, done.attempt)
        return done
    done = _train_on_gang(run, dataset)
    record_finished(run.storage, run.run_id, done)
    return done


def _train_on_gang(run: Run, dataset: DatasetReport) -> TrainingSummary:
    params = run.params
    draft = draft_record(
        params,
        run.run_id,
        run.experiment,
        run.storage,
        workload=params.workload,
        data_options=plain_values(params.data_options),
        dataset=dataset,
        weights_from=weights_from(run.resume_from),
    )
    source = path_of(params.workload.partition(":")[0], params.workload)
    recorder = RunRecorder(run.storage, draft, source)
    with training_gang(
        params,
        recorder,
        run.storage,
        name=f"{run.run_id} train",
        is_workload=True,
        fn=RUN_STAGE,
        args=lambda attempt: (run.rank_config("train", attempt), params.workload),
        **params.options_of_gang(),
    ) as values:
        last = recorder.record.attempts[-1]
        summary = TrainingSummary(
            run_id=run.run_id,
            attempt=last.attempt,
            world_size=last.world_size,
            failures=failed_attempts(run),
            duration_s=(datetime.now(UTC) - last.began).total_seconds(),
            **values[0],
        )
        recorder.trained(summary)
    return summary


@contextmanager
def training_gang(
    params: ContextParams,
    recorder: RunRecorder,
    storage: Storage,
    *,
    name: str,
    is_workload: bool,
    **call: Any,
) -> Iterator[list[Any]]:
    """Train on a gang, and yield what the ranks returned; the report ends with the context.

    Args:
        params: of the training.
        recorder: of its run record.
        storage: of the run.
        name: of the gang.
        is_workload: of train_flow, whose function makes its steps by `ctx.steps`, and whose page
            another task completes.
        **call: more of what `run_gang` takes.
    """
    run_id, shown = recorder.record.run_id, TrainingProgress(params.world_size or 0)
    report = LiveReport(storage, shown, recorder, is_published=is_workload)
    with report, current_client() as client, display_here():
        if newest := newest_attempt(storage, run_id):
            shown.attempt = newest + 1
            wait_for_earlier(client, name, params)
        yield run_gang(
            client,
            world_size=params.world_size,
            world_size_divides=params.virtual_ranks,
            name=name,
            attempt_log=RunAttemptLog(storage, run_id, knows_steps=is_workload),
            on_event=log_to_run(report.receive, shown, recorder.record.workload),
            **call,
        )


@contextmanager
def gang_report(name: str, storage: str | None = None) -> Iterator[dict[str, Any]]:
    """Show a gang in Prefect as a `ddp_task` is: page, progress, run record, events, lines kept.

    For `run_gang` in a flow or task of your own: `with gang_report("sweep") as shown:
    run_gang(client, fn, **shown)`. The ranks' lines go to the run's log.

    Args:
        name: what such gangs of this flow or deployment have in common, and are compared by;
            another for each gang of a flow run.
        storage: for the record and the lines, as for `ddp_task`, which has the same default.

    Raises:
        InvalidParamsError: it is called outside of a flow run, or the storage can't be used.
    """
    own = resolve_storage(storage or ContextParams().storage)
    own.check_writable()
    prefect_id = next(filter(None, get_task_and_flow_run_ids()), None)
    if prefect_id is None:
        msg = "gang_report shows a gang in a Prefect run, and there is none: call it in a flow"
        raise InvalidParamsError(msg)
    run_id = run_id_of(name, prefect_id)
    draft = draft_record(None, run_id, experiment_of(name), own, workload=name)
    shown = TrainingProgress(attempt=newest_attempt(own, run_id) + 1)
    with LiveReport(own, shown, RunRecorder(own, draft)) as report, display_here():
        yield {
            "name": run_id,
            "attempt_log": RunAttemptLog(own, run_id, knows_steps=False),
            "on_event": log_to_run(report.receive, shown, name),
        }
