"""The task that trains: a gang of ranks under supervision, which a retry resumes."""

from datetime import UTC, datetime
from typing import Any

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from prefect_torch_ddp.checkpoint.attempts import read_failures
from prefect_torch_ddp.gang.policy import Action, TaskFailure, decide
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.results import DatasetReport, FailedAttempt, TrainingSummary
from prefect_torch_ddp.tasks.cancel.states import or_cancelled
from prefect_torch_ddp.tasks.gangs.training_gang import training_gang
from prefect_torch_ddp.tasks.train_run import RUN_STAGE, Run
from prefect_torch_ddp.tasks.workload import path_of
from prefect_torch_ddp.tracking.description import draft_record, values_for_record
from prefect_torch_ddp.tracking.finished import finished_training, write_finished
from prefect_torch_ddp.tracking.recorder import RunRecorder
from prefect_torch_ddp.tracking.resume import began_from, weights_from


def is_worth_a_retry(_task: Task[Any, Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Tell Prefect, which asks only if retries are left, whether another attempt may succeed."""
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
    """Train on a gang, from the newest complete checkpoint if there is one."""
    return or_cancelled(_train, run, dataset)


def _train(run: Run, dataset: DatasetReport) -> TrainingSummary:
    done = finished_training(run.storage, run.run_id)
    if done is not None:
        words = "the training has finished already, in attempt %d: it is not run again"
        get_run_logger().info(words, done.attempt)
        return done
    done = _train_on_gang(run, dataset)
    write_finished(run.storage, run.run_id, done)
    return done


def draft_of(run: Run, dataset: DatasetReport | None) -> RunRecord:
    """Return what is known of a run before it trains; without a dataset before that is there."""
    return draft_record(
        run.params,
        run.run_id,
        run.experiment,
        run.storage,
        workload=run.params.workload,
        data_options=values_for_record(run.params.data_options),
        dataset=dataset,
        weights_from=weights_from(run.resume_from),
        began_from=began_from(run.params, run.resume_from, run.storage),
    )


def _train_on_gang(run: Run, dataset: DatasetReport) -> TrainingSummary:
    params = run.params
    source = path_of(params.workload.partition(":")[0], params.workload)
    recorder = RunRecorder(run.storage, draft_of(run, dataset), source)
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
