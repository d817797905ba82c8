"""Owns the gathering of workers: how many there are, who they are, and the refusal when they are too few."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed import Client

from prefect_torch_ddp.errors import GangError, NotEnoughWorkersError
from prefect_torch_ddp.gang.orders import WorkerIdentity
from prefect_torch_ddp.gang.placement import is_free
from prefect_torch_ddp.gang.switchboard import open_switchboard

POLL_S = 0.1
IMPORT_ERRORS = ("ImportError(", "ModuleNotFoundError(")


@dataclass(frozen=True)
class WorkersNeeded:
    """How many workers a gang wants, how many it can do with, and what they must have."""

    wanted: int
    enough: int
    ranks_per_worker: int
    resources: Mapping[str, float]


async def gather_workers(
    client: Client, need: WorkersNeeded, timeout_s: float, *, full_size_s: float | None = None, warm: bool = False
) -> list[WorkerIdentity]:
    """Wait until the cluster has the workers wanted, or after `full_size_s` enough of them, and return all it has.

    With `warm` their rank hosts start to load torch.

    Raises:
        NotEnoughWorkersError: not even enough were there after `timeout_s`; says how many are and how many are needed.
        GangError: this package can't be imported on a worker.
    """
    started = time.monotonic()
    while True:
        waited_s = time.monotonic() - started
        num_enough = need.enough if waited_s >= min(timeout_s if full_size_s is None else full_size_s, timeout_s) else need.wanted
        running = await _running_workers(client)
        addresses = with_resources(running, need.resources)
        if len(addresses) >= num_enough:
            workers = await _identify(client, addresses, warm=warm)
            if len(workers) >= num_enough:
                return workers
        if waited_s >= timeout_s:
            have, rpw = len(addresses), need.ranks_per_worker
            msg = too_few_text(have, len(running), need.enough, rpw, need.resources, timeout_s)
            raise NotEnoughWorkersError(msg)
        await asyncio.sleep(POLL_S)


def with_resources(running: Mapping[str, Mapping[str, float]], resources: Mapping[str, float]) -> list[str]:
    """Return the addresses of the workers that have as much of each resource, held by others or not. Pure."""
    return [address for address, has in running.items() if all(has.get(name, 0) >= want for name, want in resources.items())]


def too_few_text(  # noqa: PLR0913, PLR0917 - the numbers that it says
    num_have: int, num_running: int, num_needed: int, ranks_per_worker: int, resources: Mapping[str, float], timeout_s: float
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


async def is_alive(client: Client, worker: WorkerIdentity, timeout_s: float) -> bool:
    """Tell whether the worker is still part of the cluster, in the same life; True while it is a member and doesn't answer."""
    if worker.address not in await _running_workers(client):
        return False
    try:
        now = await asyncio.wait_for(_identify(client, [worker.address]), timeout_s)
    except TimeoutError:
        return True
    return not now or now[0].process_id == worker.process_id


async def free_workers(client: Client, resources: Mapping[str, float]) -> list[WorkerIdentity]:
    """Return the workers whose slot, threads and resources nobody holds."""
    addresses = with_resources(await _running_workers(client), resources)
    return [worker for worker in await _identify(client, addresses) if is_free(worker, resources)]


async def _running_workers(client: Client) -> dict[str, Mapping[str, float]]:
    """Return the running workers' resources, by address."""
    if client.scheduler is None:
        msg = f"the Dask client is {client.status}"
        raise GangError(msg)
    # Client.scheduler_info() has no workers on an asynchronous client.
    info: dict[str, Any] = await client.scheduler.identity(n_workers=-1)
    return {address: worker["resources"] for address, worker in info["workers"].items() if worker["status"] == "running"}


async def _identify(client: Client, addresses: list[str], *, warm: bool = False) -> list[WorkerIdentity]:
    answers = await client.run(open_switchboard, warm=warm, workers=addresses, on_error="return")
    workers = []
    for address, answer in answers.items():
        # Dask sends the text alone of an exception that doesn't come through pickle and tblib whole, and this one doesn't.
        if isinstance(answer, ImportError) or (isinstance(answer, Exception) and str(answer).startswith(IMPORT_ERRORS)):
            msg = f"worker {address} can't import prefect_torch_ddp ({answer}): install it there, in the same version as here"
            raise GangError(msg) from answer
        if isinstance(answer, WorkerIdentity):  # anything else: the worker left meanwhile
            workers.append(answer)
    return workers
