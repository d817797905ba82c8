"""Owns the gathering of workers: how many there are, who they are, and the refusal when they are too few."""

import asyncio
import time
from typing import Any

from distributed import Client

from prefect_torch_ddp.errors import GangError, NotEnoughWorkersError
from prefect_torch_ddp.gang.orders import WorkerIdentity
from prefect_torch_ddp.gang.switchboard import open_switchboard

POLL_S = 0.1


async def gather_workers(
    client: Client, num_needed: int | None, ranks_per_worker: int, timeout_s: float, *, warm: bool = False
) -> list[WorkerIdentity]:
    """Wait until the cluster has `num_needed` workers (None: at least one) and return all it has.

    With `warm` their rank hosts start to load torch.

    Raises:
        NotEnoughWorkersError: they were not there after `timeout_s`; says how many are and how many are needed.
        GangError: this package can't be imported on a worker.
    """
    deadline = time.monotonic() + timeout_s
    wanted = num_needed or 1
    while True:
        addresses = await _running_workers(client)
        if len(addresses) >= wanted:
            workers = await _identify(client, addresses, warm=warm)
            if len(workers) >= wanted:
                return workers
        if time.monotonic() >= deadline:
            per_worker = f" with {ranks_per_worker} ranks each" if ranks_per_worker > 1 else ""
            msg = (
                f"the cluster has too few workers after {timeout_s:g} s: have {len(addresses)}, need {wanted}{per_worker}; "
                f"add workers, lower world_size, or raise workers_timeout_s"
            )
            raise NotEnoughWorkersError(msg)
        await asyncio.sleep(POLL_S)


async def is_alive(client: Client, worker: WorkerIdentity, timeout_s: float) -> bool:
    """Tell whether the worker is still part of the cluster, in the same life; True while it is a member and doesn't answer."""
    if worker.address not in await _running_workers(client):
        return False
    try:
        now = await asyncio.wait_for(_identify(client, [worker.address]), timeout_s)
    except TimeoutError:
        return True
    return not now or now[0].process_id == worker.process_id


async def free_workers(client: Client) -> list[WorkerIdentity]:
    """Return the workers whose slot and threads nobody holds."""
    return [worker for worker in await _identify(client, await _running_workers(client)) if worker.occupant is None]


async def _running_workers(client: Client) -> list[str]:
    if client.scheduler is None:
        msg = f"the Dask client is {client.status}"
        raise GangError(msg)
    # Client.scheduler_info() has no workers on an asynchronous client.
    info: dict[str, Any] = await client.scheduler.identity(n_workers=-1)
    return [address for address, worker in info["workers"].items() if worker["status"] == "running"]


async def _identify(client: Client, addresses: list[str], *, warm: bool = False) -> list[WorkerIdentity]:
    answers = await client.run(open_switchboard, warm=warm, workers=addresses, on_error="return")
    workers = []
    for address, answer in answers.items():
        if isinstance(answer, ImportError):
            msg = f"worker {address} can't import prefect_torch_ddp ({answer}): install it there, in the same version as here"
            raise GangError(msg) from answer
        if isinstance(answer, WorkerIdentity):  # anything else: the worker left meanwhile
            workers.append(answer)
    return workers
