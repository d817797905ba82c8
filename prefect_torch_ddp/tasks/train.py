"""Owns the task that trains: a gang of ranks under supervision; a retry resumes."""

import time
from typing import Any

from prefect import Task, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.errors import GangCancelledError, InvalidParamsError
from prefect_torch_ddp.gang.launch import run_gang
from prefect_torch_ddp.messages import GangEvent, Progress
from prefect_torch_ddp.results import DatasetReport, TrainingReport
from prefect_torch_ddp.tasks.artifacts import LiveReport
from prefect_torch_ddp.tasks.cluster import current_client
from prefect_torch_ddp.tasks.run import RUN_STAGE, Run, log_to_run


def is_worth_a_retry(_task: Task[Any, Any], _task_run: TaskRun, state: State[Any]) -> bool:
    """Tell Prefect whether another attempt may end better: not after a cancel, nor when the input can't work."""
    error = state.result(raise_on_failure=False)
    cause = getattr(error, "__cause__", None)
    return not isinstance(error, GangCancelledError | InvalidParamsError) and not isinstance(cause, ImportError | SyntaxError)


def _cache_key(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
    # A flow run that is retried finds its finished training again.
    run: Run = parameters["run"]
    return f"train-ddp/train/{run.storage.uri}/{run.run_id}"


@task(name="train", cache_key_fn=_cache_key, persist_result=True, result_serializer="json", retry_condition_fn=is_worth_a_retry)
def train(run: Run, dataset: DatasetReport) -> TrainingReport:
    """Train on a gang, from the newest complete checkpoint where there is one; says at every retry where it goes on."""
    logger = get_run_logger()
    params = run.params
    attempt = claim_attempt(run.storage, run.run_id)
    logger.info("attempt %d trains %s on %d ranks, dataset %s", attempt, params.workload, params.world_size, dataset.dataset_id)
    started = time.monotonic()
    with LiveReport(run_id=run.run_id, workload=params.workload, world_size=params.world_size, attempt=attempt) as live:

        def show(event: GangEvent) -> None:
            if isinstance(event, Progress):
                live.update(event)

        with current_client() as client:
            values = run_gang(
                client,
                RUN_STAGE,
                args=(run.rank_config("train", attempt), params.workload),
                world_size=params.world_size,
                ranks_per_worker=params.ranks_per_worker,
                name=f"{run.run_id} train",
                attempt=attempt,
                on_event=log_to_run(show),
                **run.gang_options(),
            )
    return TrainingReport(
        run_id=run.run_id,
        attempt=attempt,
        world_size=params.world_size,
        duration_s=time.monotonic() - started,
        **values[0],
    )
