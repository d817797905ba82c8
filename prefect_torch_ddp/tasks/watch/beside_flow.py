"""What runs next to a flow until it ends: its watch, and its trackers' feed."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from uuid import UUID

import distributed
from prefect.context import FlowRunContext, TaskRunContext
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp.blocks import resolve_storage
from prefect_torch_ddp.params import ContextParams
from prefect_torch_ddp.tasks.watch.flow_watch import closed_if_killed
from prefect_torch_ddp.tasks.watch.tracker_feed import feed_until_flow_ends

OURS_GRACE_S = 5.0
OTHERS_GRACE_S = 25.0
WATCHED = "prefect_torch_ddp_watched"
"""The attribute of a task runner's stack that says that its flow run has a watch."""

_lock = threading.Lock()


def flow_watched(
    flow_run_id: UUID, stop_grace_s: float, *, ends_with_flow: bool
) -> AbstractContextManager[None]:
    """Have a flow run closed if its process is killed; see `closed_if_killed`.

    Args:
        flow_run_id: the run that this process runs.
        stop_grace_s: how long its tasks get to stop gracefully, on a cluster that lives on.
        ends_with_flow: whether the Dask cluster doesn't.
    """
    grace_s = OURS_GRACE_S if ends_with_flow else stop_grace_s + OTHERS_GRACE_S
    return closed_if_killed(flow_run_id, grace_s)


def accompany(params: ContextParams, storage: str, experiment: Callable[[], str]) -> None:
    """Have this flow watched, and its trackers fed, until it ends, as `train_flow` has.

    Args:
        params: which trackers, and how long the ranks may take to stop.
        storage: of the runs.
        experiment: of the runs; asked only if there are trackers.

    Raises:
        InvalidParamsError: as `feed_until_flow_ends`.
    """
    _watch_until_flow_ends(params.stop_grace_s)
    if params.trackers:
        feed_until_flow_ends(params, resolve_storage(storage), experiment())


def _watch_until_flow_ends(stop_grace_s: float) -> None:
    # Once for a flow run, also if several threads of it submit tasks.
    context, outer = FlowRunContext.get(), TaskRunContext.get()
    if context is None or context.flow_run is None or context.detached:
        return  # another process that has the flow's context may end before the flow's, too
    if outer is not None and outer.task_run.flow_run_id == context.flow_run.id:
        return  # a task of it may run in another process, which may end before the flow's
    runner = context.task_runner
    if not isinstance(runner, DaskTaskRunner):
        return  # the task itself refuses it
    # The stack lives as long as the flow run. Prefect has no public hook; see `watched`.
    stack = runner._exit_stack  # noqa: SLF001
    with _lock:
        if WATCHED not in vars(stack):
            ends_with_flow = runner.address is None and not _has_client()
            watch = flow_watched(context.flow_run.id, stop_grace_s, ends_with_flow=ends_with_flow)
            stack.enter_context(watch)
            vars(stack)[WATCHED] = True
            stack.callback(vars(stack).pop, WATCHED)


def _has_client() -> bool:
    """Whether a Dask client is open here, whose cluster the task runner uses."""
    try:
        distributed.get_client()
    except ValueError:
        return False
    return True
