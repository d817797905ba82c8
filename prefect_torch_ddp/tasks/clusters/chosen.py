"""Which Dask cluster a run of train-ddp uses: one that runs, a class to start, or a local one."""

from typing import Any

from dask.system import CPU_COUNT
from prefect.logging import get_run_logger
from prefect.utilities.importtools import from_qualified_name
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.gang.caller.placement import num_workers_needed
from prefect_torch_ddp.params import ClusterParams, TrainParams
from prefect_torch_ddp.tasks.clusters.dask_log import quiet_dask
from prefect_torch_ddp.tasks.clusters.local_cluster import local_cluster
from prefect_torch_ddp.tasks.clusters.scheduler_file import scheduler_address


def of_runner(runner: DaskTaskRunner) -> dict[str, Any]:
    """Return what a task runner itself says of its cluster; nothing, as `DaskTaskRunner()` does."""
    # Never a cluster object; see `cluster_objects`.
    like_any = DaskTaskRunner()
    return {
        name: getattr(runner, name)
        for name in ("address", "cluster_class", "cluster_kwargs", "adapt_kwargs")
        if getattr(runner, name) != getattr(like_any, name)
    }


def num_local_workers(params: TrainParams, ranks_each: int) -> int:
    """Return how many workers the run's own local cluster has, with `ranks_each` on each."""
    given: int | None = params.cluster.cluster_kwargs.get("n_workers")
    return given or num_workers_needed(params.world_size, ranks_each)


def point_at_cluster(runner: DaskTaskRunner, params: TrainParams) -> None:
    """Have a flow run's task runner use the cluster that the parameters choose, or its own.

    Raises:
        InvalidParamsError: the cluster class can't be imported, there is no scheduler's file, or
            the runner has a cluster of its own (`train_flow.with_options(task_runner=...)`) and
            the parameters name another.
    """
    # A flow run has its own runner (`duplicate`), and its client is made at the first use.
    cluster = params.cluster
    if own := of_runner(runner):
        if cluster == ClusterParams():
            return
        both = f"params.cluster and the flow's task runner ({', '.join(own)})"
        msg = f"{both} both say which Dask cluster trains: leave one of them empty"
        raise InvalidParamsError(msg)
    if cluster.is_running:
        runner.address = scheduler_address(cluster, params.workers_timeout_s)
        runner.client_kwargs = {**runner.client_kwargs, "timeout": "10s"}
        return
    runner.adapt_kwargs = dict(cluster.adapt_kwargs)
    if cluster.cluster_class:
        try:
            runner.resolved_cluster_class = from_qualified_name(cluster.cluster_class)
        except (ImportError, AttributeError, ValueError) as error:
            msg = f"cluster.cluster_class {cluster.cluster_class!r} can't be imported: {error}"
            raise InvalidParamsError(msg) from error
        runner.cluster_kwargs = dict(cluster.cluster_kwargs)
        quiet_dask()
        return
    runner.cluster_class = local_cluster
    if params.world_size > CPU_COUNT:
        get_run_logger().warning(
            "%d ranks share the %d cores of this machine, so each step takes longer than with %d",
            *(params.world_size, CPU_COUNT, CPU_COUNT),
        )
    ranks_each = params.ranks_per_worker or 1
    shape = {"n_workers": num_local_workers(params, ranks_each), "ranks_per_worker": ranks_each}
    runner.cluster_kwargs = {**shape, **cluster.cluster_kwargs}
