"""A task or flow that was cancelled in Prefect's state Cancelled, with what was saved."""

import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from distributed.threadpoolexecutor import secede
from prefect._internal.control_listener import get_intent
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import CancelledRun, TerminationSignal
from prefect.logging import get_run_logger
from prefect.states import Cancelled
from prefect.transactions import get_transaction

from prefect_torch_ddp.errors import (
    GangCancelledError,
    SupersededError,
    TaskCancelled,
    saved_by,
)
from prefect_torch_ddp.gang.caller.stop import named
from prefect_torch_ddp.gang.liveness import (
    forget_that_own_worker_was_to_leave,
    own_worker_leaves,
    wait_until_own_worker_stays,
)
from prefect_torch_ddp.gang.policy import Action, TaskFailure, decide
from prefect_torch_ddp.tasks.cancel.api import REQUEST_ERRORS, is_away
from prefect_torch_ddp.tasks.cancel.left_tasks import SIGNALS

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


def or_cancelled(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Do a task's work, or return the state Cancelled: no failure, so it is never tried again.

    The state says what was saved. Who cancelled the task knows why, and Prefect logs the state.
    """
    while True:
        forget_that_own_worker_was_to_leave()  # an earlier try may have seen it
        try:
            return work(*args, **kwargs)
        except (GangCancelledError, SupersededError) as error:
            moves = decide(TaskFailure(error, own_worker_leaves()), None, 0).action is Action.MOVE
            is_said = moves or isinstance(error, SupersededError)
            get_run_logger().log(logging.WARNING if is_said else logging.DEBUG, "%s", error)
            if moves and _stays_after_all() and isinstance(error, GangCancelledError):
                get_run_logger().info("its worker was to leave, and stays: it continues there")
                continue
            if isinstance(error, SupersededError):
                raise
            # Prefect takes a state for what it is.
            state: Any = _cancelled(error)
            return state  # type: ignore[no-any-return]


def _stays_after_all() -> bool:
    """Wait for the end of a worker that is to leave; return if it stays, whether to continue."""
    # What this task said would be taken for the word of the one that runs elsewhere. The thread
    # ends with its process, which doesn't wait for a thread that has left the worker's pool.
    with suppress(KeyError):
        secede(adjust=False)
    return wait_until_own_worker_stays()


def _cancelled(error: GangCancelledError) -> State[Any]:
    if (transaction := get_transaction()) is not None:
        # Else a run that is resumed, or retried, would find a cached result of None.
        transaction.write_on_commit = False
    return Cancelled(message=saved_by(error) or str(error))


def cancel_in_words(cancelled: BaseException) -> str:
    """Say what cancelled a flow, and how the task ended that it waited for."""
    is_of_task = isinstance(cancelled, TaskCancelled)
    cause = cancelled.__cause__ if is_of_task else cancelled
    by = f" by {named(cause)}" if isinstance(cause, SIGNALS) else ""
    if isinstance(cause, CancelledRun) or get_intent() == "cancel":
        by = " in Prefect"
    return f"cancelled{by}{f': {cancelled}' if is_of_task else ''}"


def flow_cancelled(why: str) -> State[Any]:
    """Return the state Cancelled for a cancelled flow run to return.

    If a deployment's runner cancels it, raise Prefect's own signal instead, as that runner expects.
    Prefect raises CancelledRun for a returned state, which the run's log then has three times with
    all of its frames, as an error.
    """
    state: State[Any] = Cancelled(message=why)
    context = FlowRunContext.get()
    if get_intent() != "cancel" or context is None or context.flow_run is None:
        return state
    try:
        with get_client(sync_client=True) as client:
            # Else it had no message.
            client.set_flow_run_state(context.flow_run.id, state, force=True)
    except REQUEST_ERRORS as error:
        if not is_away(error):
            raise
        logger.warning("Prefect could not be told that the flow run was %s: %s", why, error)
    context.flow_run.state = state  # which the run's last line in the log tells
    raise TerminationSignal(signal.SIGTERM)
