"""How a cancel reaches a task that trains, and becomes Prefect's state Cancelled."""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

import httpx
from distributed.threadpoolexecutor import secede
from prefect._internal.control_listener import get_intent
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import (
    CancelledRun,
    MissingContextError,
    ObjectNotFound,
    PrefectHTTPStatusError,
    TerminationSignal,
)
from prefect.logging import get_run_logger
from prefect.states import Cancelled
from prefect.transactions import get_transaction
from prefect_dask.task_runners import PrefectDaskFuture

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
from prefect_torch_ddp.tasks.watch.cancel_request import own_client

P = ParamSpec("P")
R = TypeVar("R")

SIGNALS = (KeyboardInterrupt, TerminationSignal)
"""What Ctrl-C, SIGTERM and Prefect's cancel are in a flow's thread."""
SLACK_S = 5.0
"""How long a task may take to notice its cancel, and Prefect to notice its end."""
LOOK_S = 0.25
CLOSE_TRIES = 3
"""How often Prefect is told of a task's end at least, if its API is away."""
REQUEST_ERRORS = (httpx.TransportError, PrefectHTTPStatusError)
"""How a request ends while Prefect's API is away, and others; see `_is_away`."""
PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)

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
        if not _is_away(error):
            raise
        logger.warning("Prefect could not be told that the flow run was %s: %s", why, error)
    context.flow_run.state = state  # which the run's last line in the log tells
    raise TerminationSignal(signal.SIGTERM)


def stop_task(
    task: PrefectDaskFuture[Any],
    grace_s: float,
    why: str = "cancelled",
    cause: BaseException | None = None,
) -> str:
    """Stop one task, as `stop_tasks` does; return what its task run says about its end."""
    (said,) = stop_tasks([(task, grace_s)], why, cause)
    return said


def stop_tasks(
    tasks: Sequence[tuple[PrefectDaskFuture[Any], float]],
    why: str = "cancelled",
    cause: BaseException | None = None,
) -> list[str]:
    """Cancel the tasks' Dask keys, which their gangs notice, and wait for the task runs' ends.

    The cluster must live so long.

    Args:
        tasks: submitted tasks' futures, each with how long it gets to end; at least one.
        why: what became of their flow, cancelled or suspended.
        cause: what the flow left its wait by, if anything.

    Returns:
        What each task run says about it.
    """
    _warn(len(tasks), max(grace_s for _, grace_s in tasks), f"{why}:", _again(cause))
    # All before the first wait, and by one message. Prefect kills the process of a run that it
    # cancels, and one that is stopped lets another that waits for its workers begin.
    started_s = time.monotonic()
    pending = [each.wrapped_future for each, _ in tasks if each.wrapped_future.status == "pending"]
    if pending:
        pending[0].client.cancel(pending, force=True)
    said: list[str] = []
    with own_client() as client:
        try:
            for task, grace_s in tasks:
                said.append(_await_end(client, task.task_run_id, started_s, grace_s, why))
        except SIGNALS:
            # Pressed again: the cluster goes at once, and nobody else would close the task runs.
            give_up_s = time.monotonic() + SLACK_S
            for task, _ in tasks[len(said) :]:
                _close(client, task.task_run_id, why, give_up_s)
            raise
    return said


def _warn(num_tasks: int, grace_s: float, why: str, again: str) -> None:
    say = run_logger().warning
    if num_tasks == 1:
        gets = "the task gets %g s to end, a training after one step and saved"
        say(f"{why} {gets}; {again} ends it at once", grace_s)
    else:
        get = "%d tasks get up to %g s to end, trainings after one step and saved"
        say(f"{why} {get}; {again} ends them at once", num_tasks, grace_s)


def _again(cause: BaseException | None) -> str:
    """Return what doesn't wait for the task: the signal that came, once more."""
    if isinstance(cause, TerminationSignal):
        return "a second SIGTERM"
    return "Ctrl-C again" if isinstance(cause, KeyboardInterrupt) else "Ctrl-C"


def run_logger() -> Any:
    """Return the run's logger, or ours if the flow has ended and its task has not."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logger


def _await_end(
    client: SyncPrefectClient, task_run_id: UUID, started_s: float, grace_s: float, why: str
) -> str:
    """Wait for a task run's end; return what it says about it."""
    has_begun = False
    while True:
        state, is_away = None, False
        # At least once: the wait for another task's end may have taken all the time.
        try:
            state = _state_of(client, task_run_id)
        except REQUEST_ERRORS as error:
            if not _is_away(error):
                raise
            is_away = True  # perhaps restarted; the ranks stop and save all the same
        if state is not None and state.is_final():
            return state.message or ""
        if state is not None and state.is_scheduled():
            _close(client, task_run_id, why, time.monotonic() + SLACK_S)
            return "its task waited for a retry"
        has_begun |= state is not None or is_away
        ends_s = started_s + (grace_s if has_begun else 0) + SLACK_S
        if time.monotonic() >= ends_s:
            break
        time.sleep(LOOK_S)
    # Of several tasks, whose time ends at once, only the first waits for an API that is away.
    _close(client, task_run_id, why, ends_s + SLACK_S)
    if is_away:
        return "Prefect did not say how its task ended"
    return "its task did not say how it ended" if has_begun else "its task had not begun"


def _state_of(client: SyncPrefectClient, task_run_id: UUID) -> State[Any] | None:
    with suppress(ObjectNotFound):  # Prefect hears of a task when it begins on its worker
        return client.read_task_run(task_run_id).state
    return None


def _is_away(error: httpx.TransportError | PrefectHTTPStatusError) -> bool:
    """Whether the API may answer the next request, and didn't just refuse this one."""
    if not isinstance(error, PrefectHTTPStatusError):
        return True
    status = error.response.status_code
    return status in PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def _close(client: SyncPrefectClient, task_run_id: UUID, why: str, give_up_s: float) -> None:
    """Set a task run Cancelled: nobody else would. An API that is away is asked again."""
    num_tries = 0
    while True:
        try:
            set_state_if_known(client, task_run_id, Cancelled(message=f"its flow was {why}"))
        except REQUEST_ERRORS as error:
            if not _is_away(error):
                raise
            num_tries += 1
            if num_tries >= CLOSE_TRIES and time.monotonic() >= give_up_s:
                words = "Prefect could not be told that the flow of task run %s was %s: %s"
                run_logger().warning(words, task_run_id, why, error)
                return
        else:
            return
        time.sleep(LOOK_S)


def set_state_if_known(client: SyncPrefectClient, task_run_id: UUID, state: State[Any]) -> None:
    """Set a task run's state, whatever it is in; Prefect knows of none before it has begun."""
    try:
        client.set_task_run_state(task_run_id, state, force=True)
    except PrefectHTTPStatusError as refused:
        if refused.response.status_code != HTTPStatus.NOT_FOUND:
            raise
