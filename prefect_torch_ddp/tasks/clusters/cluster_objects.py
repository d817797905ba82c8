"""Whether a run can use the cluster object of `DaskTaskRunner(cluster=...)`; if not, what can.

Prefect doesn't hand that object to a flow run, which uses the cluster of an open client if there is
one.
"""

from typing import Any

from distributed import Client, get_client
from prefect.context import FlowRunContext
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp.errors import InvalidParamsError


def refuse_dropped(context: FlowRunContext) -> None:
    """Refuse a flow whose `DaskTaskRunner(cluster=...)` has a cluster that this run wouldn't use.

    A run has its own runner (`duplicate`), made without that object. It uses the cluster of a
    client that is open in this process; without one it would start a local cluster in silence.

    Raises:
        InvalidParamsError: the flow's task runner has such an object, and the run's hasn't.
    """
    cluster, already, runner = _cluster_of_flow(context), open_client(), context.task_runner
    if cluster is None or (isinstance(runner, DaskTaskRunner) and _cluster_of(runner) is cluster):
        return
    used = "start a local one"
    if already is not None and already.scheduler is not None:
        if already.scheduler.address == cluster.scheduler_address:
            return
        used = f"use {already.scheduler.address}, of which a client is open in this process"
    what = "Prefect never hands the cluster of DaskTaskRunner(cluster=...) to a flow run"
    why = f"{what}, which would {used}"
    raise _refusal(why, cluster)


def refuse_sent() -> None:
    """Refuse to submit a task of a flow whose runner has a cluster object: that goes with it.

    Raises:
        InvalidParamsError: it has one; says first of all if the run wouldn't use it either.
    """
    context = FlowRunContext.get()
    if context is None or not isinstance(context.task_runner, DaskTaskRunner):
        return
    refuse_dropped(context)
    cluster = _cluster_of_flow(context)
    if cluster is not None:
        what = "a submitted task takes its flow, with its DaskTaskRunner(cluster=...), to a worker"
        why = f"{what}, and most clusters can't be pickled"
        raise _refusal(why, cluster)


def _cluster_of_flow(context: FlowRunContext) -> Any:
    """Return the cluster object that a flow's task runner was made with, or None."""
    runner = context.flow.task_runner if context.flow else None
    return _cluster_of(runner) if isinstance(runner, DaskTaskRunner) else None


def _cluster_of(runner: DaskTaskRunner) -> Any:
    return runner._cluster  # noqa: SLF001 - it has no public name


def _refusal(why: str, cluster: Any) -> InvalidParamsError:
    instead = f"DaskTaskRunner(address={cluster.scheduler_address!r})"
    do = "or open a client of it, Client(cluster), around the flow, and write DaskTaskRunner()"
    return InvalidParamsError(f"{why}: write {instead}, {do}")


def open_client() -> Client | None:
    """Return the Dask client that is open in this process, whose cluster a task runner uses."""
    try:
        return get_client()
    except ValueError:
        return None
