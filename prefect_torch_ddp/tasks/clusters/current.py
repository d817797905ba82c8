"""The Dask cluster of a Prefect run: its task runner, its client, and what went wrong with it."""

import atexit
import contextlib
import gc
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import distributed
from distributed.client import FutureCancelledError
from distributed.worker import thread_state
from prefect import Task
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, Pause
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp.errors import (
    GangCancelledError,
    GangError,
    InvalidParamsError,
    SchedulerLostError,
    StorageError,
    TaskCancelled,
)
from prefect_torch_ddp.gang.caller.workers import until_gone, workers_away
from prefect_torch_ddp.gang.liveness import liveness_timeout_s
from prefect_torch_ddp.gang.own_task import leave_thread
from prefect_torch_ddp.gang.warm import warm
from prefect_torch_ddp.params import ClusterParams, ContextParams, TrainParams
from prefect_torch_ddp.server import adjust_embedded_server
from prefect_torch_ddp.storage.protocol import Storage, trial_object
from prefect_torch_ddp.tasks.cancel.left_tasks import SIGNALS, obey_ctrl_c, stop_task
from prefect_torch_ddp.tasks.clusters.chosen import (
    num_local_workers,
    of_runner,
    point_at_cluster,
)
from prefect_torch_ddp.tasks.clusters.cluster_objects import (
    open_client,
    refuse_dropped,
    refuse_sent,
)
from prefect_torch_ddp.tasks.off_thread import submit_off_thread
from prefect_torch_ddp.tasks.watch.quiet_log import quiet_frames
from prefect_torch_ddp.tasks.watch.task_watch import answer_of
from prefect_torch_ddp.tasks.watch.watched_task import follow

if TYPE_CHECKING:
    from prefect_dask.task_runners import PrefectDaskFuture

P = ParamSpec("P")
R = TypeVar("R")

LOOK_S = 10.0
"""How long workers may take to say whether they see the storage."""
CONNECT_POLL_S = 0.02

adjust_embedded_server()  # here: a flow starts its server before any code of ours runs
quiet_frames()


@atexit.register
def _skip_last_collection() -> None:
    """Spare the interpreter's end 0.4 s of a core: it would collect the whole heap of Prefect.

    Not where torch is loaded, whose bindings then complain of leaks.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def connect(params: TrainParams, storage: Storage) -> bool:
    """Point the flow run's DaskTaskRunner at its cluster, start that if need be, and warm it.

    Returns whether it has workers, all on this machine. Raises InvalidParamsError if the address
    can't be reached, the cluster class can't be imported or started, a client that is open in this
    process would be used in place of the cluster that is described, or the workers there are don't
    share the storage.
    """
    runner, cluster = _runner(), params.cluster
    already = open_client()
    if already is not None and cluster != ClusterParams():
        address = already.scheduler.address if already.scheduler else already.status
        do = "close it, or leave cluster empty, ClusterParams()"
        msg = f"a Dask client of {address} is open in this process and would be used: {do}"
        raise InvalidParamsError(msg)
    point_at_cluster(runner, params)
    obey_ctrl_c()  # the cluster's class may just have been imported
    try:
        client = runner.client
    except Exception as error:
        made_by = cluster.cluster_class or "LocalCluster"
        what, do = f"cluster class {made_by!r}", "check cluster.cluster_kwargs"
        if cluster.is_running:
            what = f"cluster.address {runner.address!r}"
            if cluster.scheduler_file:
                what = f"cluster.scheduler_file {cluster.scheduler_file!r} ({runner.address})"
            do = "is its scheduler running, and reachable from here?"
        msg = f"{what} gave no Dask cluster: {type(error).__name__}: {error}; {do}"
        raise InvalidParamsError(msg) from error
    is_here = all_workers_here(client, storage)
    warm(client, params.workload, params.preload)
    return is_here


def with_ranks_placed(params: TrainParams) -> TrainParams:
    """Return parameters that say how many ranks a Dask worker holds.

    If this run starts its own local cluster, and no argument describes that cluster, one worker
    runs all ranks: they are forked from one process that has torch loaded. Each further worker
    would load it again, 3 s of a core, for a cluster that lives as long as the run. Raises
    InvalidParamsError if the training is to grow, since that cluster can't.
    """
    cluster = params.cluster
    is_local = not of_runner(_runner()) and not (cluster.is_running or cluster.cluster_class)
    is_ours = is_local and open_client() is None
    nothing_said = cluster == ClusterParams() and params.min_world_size is None
    if (each := params.ranks_per_worker) is None:
        each = params.world_size if is_ours and nothing_said else 1
    if is_ours and not cluster.adapt_kwargs:
        _refuse_growth(params, each * num_local_workers(params, each))
    return params.model_copy(update={"ranks_per_worker": each})


def _refuse_growth(params: TrainParams, room: int) -> None:
    """Refuse to grow beyond a cluster that is started for the run, and gets no more workers."""
    if (params.max_world_size or 0) > room:
        msg = (
            f"max_world_size is {params.max_world_size}, but the run's own local cluster has room "
            f"for {room} ranks; name a cluster, give it more workers (cluster_kwargs), or leave "
            "max_world_size out"
        )
        raise InvalidParamsError(msg)


def all_workers_here(client: distributed.Client, storage: Storage) -> bool:
    """Tell whether all workers are on this machine; refuse others that don't see its folder."""
    # Workers that come later, or don't answer, are found out when rank 0 looks for its attempt's
    # claim, and by the first checkpoint.
    away = workers_away(client)
    if not away or storage.is_shared_by_hosts:
        return away == {}
    asked: dict[str, Any] = {"workers": [*away.values()], "on_error": "return"}
    with trial_object(storage) as key:
        storage.write(key, b"")
        seen = client.sync(lambda: answer_of(client.run(storage.read, key, **asked), LOOK_S)) or {}
    blind = sorted(host for host, at in away.items() if isinstance(seen.get(at), StorageError))
    if blind:
        dont = f"{', '.join(blind)} don't see there what the flow writes"
        do = "use a folder that all hosts mount under one path, or S3"
        msg = f"the hosts don't share the storage {storage.uri}: {dont}; {do}"
        raise InvalidParamsError(msg)
    return False


@contextmanager
def current_client() -> Iterator[distributed.Client]:
    """Yield a client of the cluster that this task runs on, or that its flow uses.

    On a Dask worker the task leaves the worker's thread, which its agent may need.
    """
    worker = None
    with contextlib.suppress(ValueError):
        worker = distributed.get_worker()
    if worker is None:
        obey_ctrl_c()
        yield _runner().client
        return
    key = thread_state.key
    leave_thread()
    try:
        client = distributed.get_client()
        _wait_until_connected(client)
        _refuse_second_life(client, worker, key)
    except OSError as error:
        msg = f"the task's way to the scheduler was lost ({type(error).__name__}: {error})"
        raise SchedulerLostError(msg) from error
    yield client


def _wait_until_connected(client: distributed.Client) -> None:
    """Wait for a client that another task of this worker, whose tasks share it, is opening."""
    ends_s = time.monotonic() + liveness_timeout_s()
    while client.status in ("newly-created", "connecting") and time.monotonic() < ends_s:
        time.sleep(CONNECT_POLL_S)


def _refuse_second_life(
    client: distributed.Client, worker: distributed.Worker, key: object
) -> None:
    # A task that Dask has taken from this worker would train in parallel to its replacement.
    scheduler: Any = client.scheduler
    limit_s = liveness_timeout_s()
    tasks = client.sync(lambda: answer_of(scheduler.processing(workers=None), limit_s))
    if tasks is None:
        msg = f"the scheduler {scheduler.address} was silent for {limit_s:g} s"
        raise SchedulerLostError(msg)
    if key not in tasks.get(worker.address, ()):
        msg = f"Dask has taken this task from worker {worker.address}; training is not run twice"
        raise GangCancelledError(msg)


def wait_for_earlier(client: distributed.Client, name: str, params: ContextParams) -> None:
    """Wait until a gang of this name has stopped, for as long as one gets to stop.

    Dask runs the task of a retired worker again at once, elsewhere: that attempt must not fence
    off the last checkpoint of the one that still stops there.
    """
    limit_s = params.stop_grace_s
    say = get_run_logger().info
    with contextlib.suppress(GangError, OSError):  # then the gang itself says what is wrong
        client.sync(until_gone, client, name, params.resources or {}, limit_s, say)


def result_of(future: PrefectFuture[R], params: TrainParams) -> R:
    """Return a submitted task's result, or raise what it raised or how it was lost or cancelled.

    Silent workers of a cluster that this run made are replaced. Raises NotEnoughWorkersError if the
    cluster has no worker at all for too long.
    """
    task = cast("PrefectDaskFuture[R]", future)
    runner = _runner()
    try:
        follow(
            task,
            runner.client,
            owns_workers=runner.address is None and open_client() in (None, runner.client),
            workers_timeout_s=_empty_limit_s(params),
        )
        return task.result()
    except Pause:
        stop_task(task, params.stop_grace_s, "suspended")
        raise
    except (*SIGNALS, CancelledRun, FutureCancelledError) as error:
        said = stop_task(task, params.stop_grace_s, cause=error)
        raise TaskCancelled(said) from error
    finally:
        # Dask runs a finished task again when its worker is lost, as long as a future is left; and
        # this one stays in the frames of each TimeoutError of the wait, until they are collected.
        task.wrapped_future.release()


def _empty_limit_s(params: TrainParams) -> float:
    """Return for how long the cluster may have no worker at all."""
    # Jobs of a batch system may queue for hours, at the start and when all were preempted; and
    # the class that submitted them fails by itself if it can't.
    return math.inf if params.cluster.cluster_class else params.workers_timeout_s


def on_worker(task: Task[P, R], params: TrainParams, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a task on a Dask worker, whose thread it leaves to the ranks; see `result_of`."""
    refuse_sent()
    return result_of(submit_off_thread(task, *args, **kwargs), params)


def cluster_lives() -> bool:
    """Whether the scheduler of the flow's cluster still answers, so that it takes a task again."""
    client = _runner().client
    scheduler: Any = client.scheduler
    limit_s = liveness_timeout_s()
    return client.status == "running" and (
        client.sync(lambda: answer_of(scheduler.identity(n_workers=0), limit_s)) is not None
    )


def _runner() -> DaskTaskRunner:
    context = FlowRunContext.get()
    runner = context.task_runner if context else None
    if not isinstance(runner, DaskTaskRunner):
        where = "there is no flow run"
        if context and context.flow:
            where = f"flow {context.flow.name!r} uses {type(runner).__name__}"
        needs = f"a DDP task needs the Dask cluster of its flow, but {where}"
        msg = f"{needs}; write @flow(task_runner=DaskTaskRunner(...))"
        raise InvalidParamsError(msg)
    if context:
        refuse_dropped(context)
    return runner
