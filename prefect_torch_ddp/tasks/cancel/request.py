"""Whether a flow run was cancelled in Prefect, if nothing but the flow itself would notice."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.context import FlowRunContext, TaskRunContext
from prefect.states import Cancelled

from prefect_torch_ddp.tasks.cancel.api import own_client

LOOK_EVERY_S = 5.0


def run_without_runner() -> UUID | None:
    """Return the flow run, unless it is a deployment's, or there is none."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    return run.id if run is not None and run.deployment_id is None else None


@contextmanager
def cancel_request() -> Iterator[Callable[[], bool]]:
    """Give a check whether somebody has cancelled this flow run in Prefect.

    A deployment's runner sends SIGTERM to the flow's process. A run that a script began has no
    runner: it would stay in the state Cancelling, and train on. Within a task the flow looks.
    """
    run_id, is_requested, is_over = run_without_runner(), threading.Event(), threading.Event()
    if run_id is None or TaskRunContext.get() is not None:
        yield is_requested.is_set
        return

    def look() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            # An API that is away is asked again. To make a client costs 0.1 s of a core.
            with suppress(Exception), own_client() as client:
                while not _is_cancelling(client, run_id):
                    if is_over.wait(LOOK_EVERY_S):
                        return
                is_requested.set()
                return

    # A thread: a request may hang, and the settings, the API's address with them, are in a context.
    name = "prefect-torch-ddp-cancel-request"
    threading.Thread(target=copy_context().run, args=(look,), name=name, daemon=True).start()
    try:
        yield is_requested.is_set
    finally:
        is_over.set()


def close_cancelled(run_id: UUID | None) -> None:
    """Set a run of `run_without_runner` Cancelled if it is Cancelling: no other state would do."""
    if run_id is not None:
        with own_client() as client:
            if _is_cancelling(client, run_id):
                client.set_flow_run_state(run_id, Cancelled(message="cancelled"), force=True)


def _is_cancelling(client: SyncPrefectClient, run_id: UUID) -> bool:
    state = client.read_flow_run(run_id).state
    return state is not None and state.is_cancelling()
