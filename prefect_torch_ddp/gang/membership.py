"""Owns the questions which workers the scheduler counts as running, who they are, whether they answer; none waits for ever."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Literal

from distributed import Client

from prefect_torch_ddp.errors import GangError, SchedulerLostError
from prefect_torch_ddp.gang.orders import WorkerIdentity
from prefect_torch_ddp.gang.silence import SILENCE_S
from prefect_torch_ddp.gang.switchboard import open_switchboard

IMPORT_ERRORS = ("ImportError(", "ModuleNotFoundError(")
SECOND_LOOK_S = 2.0
"""How long each worker may take to answer when not all of them did; all of them have had time for their imports by then."""


class SchedulerSilentError(SchedulerLostError):
    """The scheduler doesn't answer, for now or for good."""


async def look_for(client: Client, worker: WorkerIdentity, timeout_s: float) -> Literal["answers", "silent", "gone"]:
    """Tell whether the worker is still part of the cluster, in the same life, and answers.

    Raises:
        SchedulerSilentError: the scheduler itself doesn't answer.
        SchedulerLostError: it is gone.
    """
    if worker.address not in await running_workers(client, timeout_s):
        return "gone"
    try:
        now = await asyncio.wait_for(_ask(client, [worker.address]), timeout_s)
    except TimeoutError:
        return "silent"
    if not now:
        return "silent"
    return "answers" if now[0].process_id == worker.process_id else "gone"


async def running_workers(client: Client, timeout_s: float = SILENCE_S) -> dict[str, Mapping[str, float]]:
    """Return the running workers' resources, by address.

    Raises:
        SchedulerSilentError: the scheduler doesn't answer.
        SchedulerLostError: it is gone.
    """
    if client.scheduler is None:
        msg = f"the scheduler was lost (the Dask client is {client.status})"
        raise SchedulerLostError(msg)
    try:
        # Client.scheduler_info() has no workers on an asynchronous client.
        info: dict[str, Any] = await asyncio.wait_for(client.scheduler.identity(n_workers=-1), timeout_s)
    except TimeoutError:
        msg = f"the scheduler {client.scheduler.address} was silent for {SILENCE_S:g} s"
        raise SchedulerSilentError(msg) from None
    except OSError as error:
        msg = f"the scheduler was lost ({type(error).__name__}: {error})"
        raise SchedulerLostError(msg) from error
    return {address: worker["resources"] for address, worker in info["workers"].items() if worker["status"] == "running"}


async def identify(client: Client, addresses: list[str], *, warm: bool = False) -> list[WorkerIdentity]:
    """Return the workers that answer; a stopped one neither answers nor leaves the cluster, for five minutes."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(_ask(client, addresses, warm=warm), SILENCE_S)
    each = [asyncio.wait_for(_ask(client, [address], warm=warm), SECOND_LOOK_S) for address in addresses]
    answers = await asyncio.gather(*each, return_exceptions=True)
    found: list[WorkerIdentity] = []
    for answer in answers:
        if isinstance(answer, GangError):
            raise answer
        found += [] if isinstance(answer, BaseException) else answer
    return found


async def _ask(client: Client, addresses: list[str], *, warm: bool = False) -> list[WorkerIdentity]:
    try:
        answers = await client.run(open_switchboard, warm=warm, workers=addresses, on_error="return")
    except OSError as error:
        msg = f"the scheduler was lost ({type(error).__name__}: {error})"
        raise SchedulerLostError(msg) from error
    workers = []
    for address, answer in answers.items():
        # Dask sends the text alone of an exception that doesn't come through pickle and tblib whole, and this one doesn't.
        if isinstance(answer, ImportError) or (isinstance(answer, Exception) and str(answer).startswith(IMPORT_ERRORS)):
            msg = f"worker {address} can't import prefect_torch_ddp ({answer}): install it there, in the same version as here"
            raise GangError(msg) from answer
        if isinstance(answer, WorkerIdentity):  # anything else: the worker left meanwhile
            workers.append(answer)
    return workers
