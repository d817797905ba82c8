"""What a cancelled flow asks Prefect's API, which may be away just then, and what it tells it."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import MissingContextError, ObjectNotFound, PrefectHTTPStatusError
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled

REQUEST_TIMEOUT_S = 10.0
LOOK_S = 0.25
SLACK_S = 5.0
"""How long a task may take to notice its cancel, and Prefect to notice its end."""
CLOSE_TRIES = 3
"""How often Prefect is told of a task's end at least, if its API is away."""
REQUEST_ERRORS = (httpx.TransportError, PrefectHTTPStatusError)
"""How a request ends while Prefect's API is away, and others; see `is_away`."""
PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
NOT_TOLD = "Prefect could not be told that the flow of task run %s was %s: %s"

logger = logging.getLogger(__name__)


@contextmanager
def own_client() -> Iterator[SyncPrefectClient]:
    """Give a separate client, whose requests soon fail if the API is away."""
    own = {"timeout": REQUEST_TIMEOUT_S}  # not the one that the flow's thread uses
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(sync_client=True, httpx_settings=own) as client,
    ):
        yield client


def is_away(error: httpx.TransportError | PrefectHTTPStatusError) -> bool:
    """Whether the API may answer the next request, and didn't just refuse this one."""
    if not isinstance(error, PrefectHTTPStatusError):
        return True
    status = error.response.status_code
    return status in PASSING or status >= HTTPStatus.INTERNAL_SERVER_ERROR


def close_all(task_run_ids: list[UUID], why: str) -> None:
    """Set them Cancelled, whatever Prefect says to that: what the user pressed goes on."""
    give_up_s = time.monotonic() + SLACK_S
    with own_client() as client:
        for task_run_id in task_run_ids:
            try:
                close(client, task_run_id, why, give_up_s)
            except PrefectHTTPStatusError as refused:
                run_logger().warning(NOT_TOLD, task_run_id, why, refused)


def close(client: SyncPrefectClient, task_run_id: UUID, why: str, give_up_s: float) -> None:
    """Set a task run Cancelled: nobody else would. An API that is away is asked again."""
    num_tries = 0
    while True:
        try:
            set_state_if_known(client, task_run_id, Cancelled(message=f"its flow was {why}"))
        except REQUEST_ERRORS as error:
            if not is_away(error):
                raise
            num_tries += 1
            if num_tries >= CLOSE_TRIES and time.monotonic() >= give_up_s:
                run_logger().warning(NOT_TOLD, task_run_id, why, error)
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


def state_of(client: SyncPrefectClient, task_run_id: UUID) -> State[Any] | None:
    """Return a task run's state, or None if Prefect hasn't heard of it."""
    with suppress(ObjectNotFound):  # Prefect hears of a task when it begins on its worker
        return client.read_task_run(task_run_id).state
    return None


def run_logger() -> Any:
    """Return the run's logger, or ours if the flow has ended and its task has not."""
    try:
        return get_run_logger()
    except MissingContextError:
        return logger
