"""Owns how a cancel reaches a task that trains, and how it becomes Prefect's state Cancelled."""

import time
from typing import Any

from prefect.client.orchestration import get_client
from prefect.exceptions import TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Cancelled
from prefect_dask.task_runners import PrefectDaskFuture

from prefect_torch_ddp.errors import GangCancelledError

SIGNALS = (KeyboardInterrupt, TerminationSignal)
"""What Ctrl-C, SIGTERM and Prefect's cancel are in a flow's thread."""
SLACK_S = 5.0
"""How long a task may take to hear of its cancel, and Prefect to hear of its end."""
LOOK_S = 0.25


def cancelled(error: GangCancelledError) -> Any:
    """Return what a task returns instead of its value; not a failure, so it is never tried again."""
    get_run_logger().warning("%s", error)
    return Cancelled(message=str(error))


class TaskCancelled(BaseException):
    """A task of the flow was cancelled, by the flow's own end or from outside; the text says how it ended.

    No Exception: what a flow does about failures is not meant.
    """


def stop_task(task: PrefectDaskFuture[Any], grace_s: float) -> str:
    """Cancel a task's Dask key, which its gang notices, and wait for the task run's end; the cluster must live so long.

    Returns:
        What the task run says about it.
    """
    if task.wrapped_future.status == "pending":
        task.wrapped_future.cancel(force=True)
    deadline_s = time.monotonic() + grace_s + SLACK_S
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline_s:
            state = client.read_task_run(task.task_run_id).state
            if state is not None and state.is_final():
                return state.message or ""
            time.sleep(LOOK_S)
        client.set_task_run_state(task.task_run_id, Cancelled(message="its flow was cancelled"), force=True)
    return "its task did not say how it ended"
