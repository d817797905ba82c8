"""The task that prepares a dataset: the workload's `prepare` on one rank, unless it exists."""

from typing import Any

from prefect import task
from prefect.context import TaskRunContext
from prefect.logging import get_run_logger

from prefect_torch_ddp.protocol.prepared import LazyDataset
from prefect_torch_ddp.results import DatasetReport, count
from prefect_torch_ddp.tasks.cancel.states import or_cancelled
from prefect_torch_ddp.tasks.clusters.current import current_client
from prefect_torch_ddp.tasks.gangs.computed import publish_computed
from prefect_torch_ddp.tasks.gangs.preparation import PreparationPage
from prefect_torch_ddp.tasks.gangs.stage import run_stage
from prefect_torch_ddp.tasks.report.markdown import size
from prefect_torch_ddp.tasks.train_run import Run


def _cache_key(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
    run: Run = parameters["run"]
    return f"train-ddp/prepare/{run.storage.uri}/{run.dataset_id}"


# The flow sets refresh_cache where somebody deleted the data that a cached result refers to.
@task(name="prepare", cache_key_fn=_cache_key, persist_result=True, result_serializer="json")
def prepare(run: Run) -> DatasetReport:
    """Run the workload's `prepare` on one rank and publish its dataset, unless it exists."""
    there = run.find_dataset()
    if there is None:
        return or_cancelled(_prepare, run)
    get_run_logger().info(
        "dataset %s is already at %s: nothing to prepare", there.dataset_id, there.uri
    )
    return there


def _prepare(run: Run) -> DatasetReport:
    config = run.rank_config("prepare", attempt=1)
    returned = run_stage(run, config, 1, "logs/prepare")
    if isinstance(returned, LazyDataset):
        with (
            current_client() as client,
            PreparationPage(run.experiment, run.run_id) as page,
        ):
            returned = publish_computed(
                client, run.storage, run.dataset_id, returned, get_run_logger(), show=page.show
            )
    made = DatasetReport.model_validate(returned)
    words = "prepared dataset %s (%s, %s) at %s"
    extent = count(made.num_files, "file"), size(made.num_bytes)
    get_run_logger().info(words, made.dataset_id, *extent, made.uri)
    return made
