"""Owns the gathering of workers: how many there are, who they are, and the refusal when they are too few."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from distributed import Client

from prefect_torch_ddp.errors import NotEnoughWorkersError
from prefect_torch_ddp.gang.membership import identify, running_workers
from prefect_torch_ddp.gang.orders import WorkerIdentity
from prefect_torch_ddp.gang.placement import is_free

POLL_S = 0.1


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
        SchedulerLostError: the scheduler is gone or silent.
    """
    started = time.monotonic()
    workers: list[WorkerIdentity] = []
    while True:
        waited_s = time.monotonic() - started
        num_enough = need.enough if waited_s >= min(timeout_s if full_size_s is None else full_size_s, timeout_s) else need.wanted
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


async def free_workers(client: Client, resources: Mapping[str, float]) -> list[WorkerIdentity]:
    """Return the workers whose slot, threads and resources nobody holds."""
    addresses = with_resources(await running_workers(client), resources)
    return [worker for worker in await identify(client, addresses) if is_free(worker, resources)]
