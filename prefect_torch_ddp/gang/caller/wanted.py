"""Asking for workers that a gang lacks: by Dask tasks that wait, which every autoscaler counts.

Dask's Adaptive, and what Kubernetes, Slurm and gateways build on it, starts as many workers as
`Scheduler.adaptive_target` names. That counts tasks, and a gang that only looks for workers is
none. So stand-ins wait for them: tasks that no worker may run, however many come.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Collection
from typing import Any, Self
from uuid import uuid4

import dask.config
from distributed import Client, Future

from prefect_torch_ddp.gang.caller.plan import GangPlan

ASK_EVERY_S = 0.25
"""How often the number of stand-ins is made right, since workers come; autoscalers look every
second."""
ANSWER_S = 2.0
PREFIX = "ddp-workers-wanted"
"""How the stand-ins' keys begin, and what Dask's dashboard calls them."""
SEEMS_TO_TAKE = "1h"
"""What the scheduler takes a stand-in to last. One that it knows nothing of would take half a
second for it, and ten of them one thread."""
NOWHERE = "tcp://0.0.0.0:1"
"""An address that no worker has, and that needs no look-up of a name."""


class WorkersWanted:
    """The workers that one attempt of a gang asks for; runs on the client's event loop.

    Nothing is left of it after the context, or once the client is gone.
    """

    def __init__(self, client: Client, plan: GangPlan) -> None:
        """Ask for nothing yet."""
        self._client = client
        self._resources = plan.resources
        self._stand_ins: list[Future[Any]] = []
        self._is_known = False
        self._asked_s = -math.inf

    def __enter__(self) -> Self:
        """Begin; nothing is asked for yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ask for nothing more."""
        self.withdraw()

    async def ask(self, num_more: int, own: Collection[str] | None = None) -> None:
        """Ask for so many workers more than there are; again and again while they lack.

        Args:
            num_more: how many. Where `own` is given, idle workers are some of them.
            own: the addresses of the workers that the gang has.
        """
        now = time.monotonic()
        if now - self._asked_s < ASK_EVERY_S:
            return
        self._asked_s = now
        # A scheduler that doesn't answer is found by those who look for workers.
        with contextlib.suppress(OSError, TimeoutError):
            num = await asyncio.wait_for(self._num_wanted(num_more, own), ANSWER_S)
            self._have(num)

    def withdraw(self) -> None:
        """Ask for nothing more."""
        self._have(0)

    def _have(self, num: int) -> None:
        waiting = [each for each in self._stand_ins if each.status == "pending"]
        self._stand_ins, too_many = waiting[:num], waiting[num:]
        for each in too_many:
            each.release()
        keys = [f"{PREFIX}-{uuid4().hex}" for _ in range(num - len(self._stand_ins))]
        if keys:
            self._stand_ins += self._client.map(
                never_runs,
                keys,
                key=keys,
                workers=[NOWHERE],
                resources=self._resources or None,
                pure=False,
            )

    async def _num_wanted(self, num_more: int, own: Collection[str] | None) -> int:
        scheduler: Any = self._client.scheduler
        if scheduler is None:
            return 0
        if not self._is_known:
            durations = {"default-task-durations": {PREFIX: SEEMS_TO_TAKE}}
            settings = {"distributed": {"scheduler": durations}}
            await self._client.run_on_scheduler(dask.config.update_defaults, settings)
            self._is_known = True
        workers: dict[str, Any] = (await scheduler.identity(n_workers=-1))["workers"]
        tasks: dict[str, list[Any]] = await scheduler.processing(workers=None)
        if own is not None:
            num_more -= sum(
                address not in own and not tasks.get(address) and self._has_resources(worker)
                for address, worker in workers.items()
            )
        num_threads = sum(worker["nthreads"] for worker in workers.values())
        return num_stand_ins(num_more, len(workers), num_threads, sum(map(len, tasks.values())))

    def _has_resources(self, worker: dict[str, Any]) -> bool:
        return all(
            worker["resources"].get(name, 0) >= want for name, want in self._resources.items()
        )


def num_stand_ins(num_more: int, num_workers: int, num_threads: int, num_tasks: int) -> int:
    """Return how many tasks have to wait for Dask to aim at `num_more` workers more. Pure.

    Dask aims at a thread for each task that waits or runs, and at as many workers as have these
    threads, if new ones are like those that there are; a cluster without workers starts one for
    each task that waits.

    Args:
        num_more: how many workers more; fewer than none if some are superfluous.
        num_workers: how many there are.
        num_threads: how many threads these have together.
        num_tasks: how many tasks they have.
    """
    if not num_workers:
        return max(0, num_more)
    threads = math.floor((num_workers + num_more) * num_threads / num_workers)
    return max(0, num_more, threads - num_tasks)


def never_runs(_key: str) -> None:
    """Stand for a rank's agent that has no worker yet."""
