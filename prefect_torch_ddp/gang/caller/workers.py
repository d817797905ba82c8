"""Owns the gathering of workers: how many there are, who they are, and the refusal when they
are too few.

Owns the questions which workers the scheduler counts as running, who they are, whether they
answer; none waits for ever.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from distributed import Client

from prefect_torch_ddp.errors import (
    GangError,
    NotEnoughWorkersError,
    SchedulerLostError,
    SchedulerUnresponsiveError,
)
from prefect_torch_ddp.gang.caller.placement import is_free
from prefect_torch_ddp.gang.liveness import LIVENESS_TIMEOUT_S
from prefect_torch_ddp.gang.worker.rpc import register_rpc
from prefect_torch_ddp.protocol.agent import WorkerIdentity

POLL_S = 0.1


@dataclass(frozen=True)
class WorkersNeeded:
    """How many workers a gang wants, how many it can do with, and what they must have."""

    wanted: int
    enough: int
    ranks_per_worker: int
    resources: Mapping[str, float]


async def gather_workers(
    client: Client,
    need: WorkersNeeded,
    timeout_s: float,
    *,
    full_size_s: float | None = None,
    warm: bool = False,
) -> list[WorkerIdentity]:
    """Wait until the cluster has the workers wanted, or after `full_size_s` enough of them, and
    return all it has.

    With `warm` their fork servers start to load torch.

    Raises:
        NotEnoughWorkersError: not even enough were there after `timeout_s`; says how many are
            and how many are needed.
        GangError: this package can't be imported on a worker.
        SchedulerLostError: the scheduler is gone or silent.
    """
    started = time.monotonic()
    workers: list[WorkerIdentity] = []
    while True:
        waited_s = time.monotonic() - started
        num_enough = (
            need.enough
            if waited_s >= min(timeout_s if full_size_s is None else full_size_s, timeout_s)
            else need.wanted
        )
        running = await running_workers(client)
        addresses = with_resources(running, need.resources)
        if len(addresses) >= num_enough:
            workers = await identify(client, addresses, warm=warm)
            if len(workers) >= num_enough:
                return workers
        if waited_s >= timeout_s:
            have, rpw = len(addresses), need.ranks_per_worker
            msg = too_few_text(have, len(running), need.enough, rpw, need.resources, timeout_s)
            if have >= need.enough:
                msg = f"{len(workers)} of {have} workers answer: {msg}"
            raise NotEnoughWorkersError(msg)
        await asyncio.sleep(POLL_S)


def with_resources(
    running: Mapping[str, Mapping[str, float]], resources: Mapping[str, float]
) -> list[str]:
    """Return the addresses of the workers that have as much of each resource, held by others or
    not. Pure.
    """
    return [
        address
        for address, has in running.items()
        if all(has.get(name, 0) >= want for name, want in resources.items())
    ]


def too_few_text(  # noqa: PLR0913, PLR0917 - the numbers that it says
    num_have: int,
    num_running: int,
    num_needed: int,
    ranks_per_worker: int,
    resources: Mapping[str, float],
    timeout_s: float,
) -> str:
    """Say how many workers there are and how many are needed. Pure."""
    per_worker = f" with {ranks_per_worker} ranks each" if ranks_per_worker > 1 else ""
    if not resources:
        return (
            f"the cluster has too few workers after {timeout_s:g} s: have {num_have}, need {num_needed}{per_worker}; "
            f"add workers, lower world_size, or raise workers_timeout_s"
        )
    what = ", ".join(f"{name}>={amount:g}" for name, amount in resources.items())
    workers = "worker" if num_have == 1 else "workers"
    return (
        f"the cluster has {num_have} {workers} with {what}, need {num_needed}{per_worker}; it has {num_running} in all "
        f"after {timeout_s:g} s: start workers with --resources, lower world_size, or raise workers_timeout_s"
    )


async def free_workers(client: Client, resources: Mapping[str, float]) -> list[WorkerIdentity]:
    """Return the workers whose slot, threads and resources nobody holds."""
    addresses = with_resources(await running_workers(client), resources)
    return [worker for worker in await identify(client, addresses) if is_free(worker, resources)]


IMPORT_ERRORS = ("ImportError(", "ModuleNotFoundError(")
SECOND_LOOK_S = 2.0
"""How long each worker may take to answer when not all of them did; all of them have had time
for their imports by then."""


async def look_for(
    client: Client, worker: WorkerIdentity, timeout_s: float
) -> Literal["answers", "silent", "gone"]:
    """Tell whether the worker is still part of the cluster, in the same life, and answers.

    Raises:
        SchedulerUnresponsiveError: the scheduler itself doesn't answer.
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


async def running_workers(
    client: Client, timeout_s: float = LIVENESS_TIMEOUT_S
) -> dict[str, Mapping[str, float]]:
    """Return the running workers' resources, by address.

    Raises:
        SchedulerUnresponsiveError: the scheduler doesn't answer.
        SchedulerLostError: it is gone.
    """
    if client.scheduler is None:
        msg = f"the scheduler was lost (the Dask client is {client.status})"
        raise SchedulerLostError(msg)
    try:
        # Client.scheduler_info() has no workers on an asynchronous client.
        info: dict[str, Any] = await asyncio.wait_for(
            client.scheduler.identity(n_workers=-1), timeout_s
        )
    except TimeoutError:
        msg = f"the scheduler {client.scheduler.address} was silent for {LIVENESS_TIMEOUT_S:g} s"
        raise SchedulerUnresponsiveError(msg) from None
    except OSError as error:
        msg = f"the scheduler was lost ({type(error).__name__}: {error})"
        raise SchedulerLostError(msg) from error
    return {
        address: worker["resources"]
        for address, worker in info["workers"].items()
        if worker["status"] == "running"
    }


async def identify(
    client: Client, addresses: list[str], *, warm: bool = False
) -> list[WorkerIdentity]:
    """Return the workers that answer; a stopped one neither answers nor leaves the cluster, for
    five minutes.
    """
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(_ask(client, addresses, warm=warm), LIVENESS_TIMEOUT_S)
    each = [
        asyncio.wait_for(_ask(client, [address], warm=warm), SECOND_LOOK_S) for address in addresses
    ]
    answers = await asyncio.gather(*each, return_exceptions=True)
    found: list[WorkerIdentity] = []
    for answer in answers:
        if isinstance(answer, GangError):
            raise answer
        found += [] if isinstance(answer, BaseException) else answer
    return found


async def _ask(client: Client, addresses: list[str], *, warm: bool = False) -> list[WorkerIdentity]:
    try:
        answers = await client.run(register_rpc, warm=warm, workers=addresses, on_error="return")
    except OSError as error:
        msg = f"the scheduler was lost ({type(error).__name__}: {error})"
        raise SchedulerLostError(msg) from error
    workers = []
    for address, answer in answers.items():
        # Dask sends the text alone of an exception that doesn't come through pickle and tblib
        # whole, and this one doesn't.
        if isinstance(answer, ImportError) or (
            isinstance(answer, Exception) and str(answer).startswith(IMPORT_ERRORS)
        ):
            msg = f"worker {address} can't import prefect_torch_ddp ({answer}): install it there, in the same version as here"
            raise GangError(msg) from answer
        if isinstance(answer, WorkerIdentity):  # anything else: the worker left meanwhile
            workers.append(answer)
    return workers
