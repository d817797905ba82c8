"""The task that prepares a workload's dataset, once for the same code, options and source."""

from typing import Any

from prefect import task
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from prefect_torch_ddp.data.dataset_store import find_dataset
from prefect_torch_ddp.gang.restarts import CallAttemptLog
from prefect_torch_ddp.gang.run import run_gang
from prefect_torch_ddp.records.rank_log import LogFolder
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.tasks.cluster import current_client
from prefect_torch_ddp.tasks.report.markdown import count, size
from prefect_torch_ddp.tasks.run import RUN_STAGE, Run, log_to_run
from prefect_torch_ddp.tasks.watch.cancel import or_cancelled


def _cache_key(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
    run: Run = parameters["run"]
    return f"train-ddp/prepare/{run.storage.uri}/{run.dataset_id}"


# The flow sets refresh_cache where somebody deleted the data that a cached result refers to.
@task(name="prepare", cache_key_fn=_cache_key, persist_result=True, result_serializer="json")
def prepare(run: Run) -> DatasetReport:
    """Run the workload's `prepare` on one rank and publish its dataset, unless it exists."""
    there = find_dataset(run.storage, run.dataset_id)
    if there is None:
        return or_cancelled(_prepare, run)
    get_run_logger().info(
        "dataset %s is already at %s: nothing to prepare", there.dataset_id, there.uri
    )
    return there


def _prepare(run: Run) -> DatasetReport:
    with current_client() as client:
        (report,) = run_gang(
            client,
            RUN_STAGE,
            args=(run.rank_config("prepare", attempt=1), run.params.workload),
            world_size=1,
            process_group="none",
            name=f"{run.run_id} prepare",
            attempt_log=CallAttemptLog(logs=LogFolder(run.storage, run.run_id, "logs/prepare")),
            on_event=log_to_run(),
            **run.gang_options(
                world_size=1, max_restarts=0, max_world_size=None, progress_timeout_s=None
            ),
        )
    made = DatasetReport.model_validate(report)
    words = "prepared dataset %s (%s files, %s) at %s"
    extent = count(made.num_files), size(made.num_bytes)
    get_run_logger().info(words, made.dataset_id, *extent, made.uri)
    return made
