"""Owns the taking of agents from the caller's side: all of them or none, giving way where two
gangs would wait for each other.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from distributed import Client

from prefect_torch_ddp.errors import (
    AgentLostError,
    GangCancelledError,
    NotEnoughWorkersError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.caller.agent_client import AgentClient
from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.gang.caller.workers import free_workers
from prefect_torch_ddp.gang.worker.agent import agent_key, run_agent
from prefect_torch_ddp.protocol.agent import WorkerIdentity

LOOK_AGAIN_S = 2.0
"""How often a waiting gang looks whether other workers than the chosen ones have become
free."""
WAIT_MESSAGE_S = 10.0
"""How often the caller is told for whom its gang waits."""
STAY_IN_TOUCH_S = 2.0
"""How often an agent that was taken is polled while others are still waited for."""


class GangReservation:
    """Runs on the client's event loop, for one attempt to agent one gang."""

    def __init__(
        self,
        client: Client,
        plan: GangPlan,
        workers: Sequence[WorkerIdentity],
        placement: Placement,
    ) -> None:
        """Take the plan and the workers it was placed on; nothing is submitted yet."""
        self._client = client
        self._plan = plan
        self._placement = placement
        self._workers = {worker.address: worker for worker in workers}
        self.links: list[AgentClient] = []
        self._all_reserved = asyncio.Event()
        self._looked_s = time.monotonic()

    async def take(self, deadline_s: float | None, say: Callable[[str], None]) -> bool:
        """Take all agents, or none; False when a more senior gang or a better choice of workers
        made it give way.

        Raises:
            NotEnoughWorkersError: the workers stayed busy past the deadline (of
                `time.monotonic`); says who held them.
        """
        self._submit()
        started = last_said = time.monotonic()
        polls = [asyncio.create_task(self._poll_until_all_reserved(link)) for link in self.links]
        try:
            while True:
                await asyncio.wait(polls, timeout=0.25)
                _raise_first(polls)
                missing = [link for link in self.links if link.state != "reserved"]
                if not missing:
                    return True
                now = time.monotonic()
                if deadline_s is not None and now >= deadline_s:
                    raise NotEnoughWorkersError(self._busy_text(missing, now - started))
                if now - last_said >= (WAIT_MESSAGE_S if last_said > started else 1.0):
                    last_said = now
                    say(self._busy_text(missing, now - started))
                if self._must_give_way(missing) or await self._has_better_choice(missing, now):
                    return False
        finally:
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    def _submit(self) -> None:
        first_worker = self._placement.workers[0]
        for address in self._placement.workers:
            worker = self._workers[address]
            reservation = self._plan.reservation(
                worker,
                hosts_store=address == first_worker,
                store_host=self._placement.places[0].address,
            )
            # Pinned hard: with loose restrictions Dask may steal a waiting agent for another
            # worker. Not pure, never retried.
            future = self._client.submit(
                run_agent,
                reservation,
                key=agent_key(reservation.token),
                workers=[address],
                pure=False,
                retries=0,
                resources=dict(self._plan.resources) or None,
            )
            self.links.append(AgentClient(self._client, worker, reservation.token, future))

    def _must_give_way(self, missing: Sequence[AgentClient]) -> bool:
        """Whether a more senior gang that also still waits holds one of our agents: it would
        wait for us as we for it.
        """
        for link in missing:
            holder = link.report.occupant if link.report else None
            if (
                holder is not None
                and holder.seniority is not None
                and holder.seniority < self._plan.seniority
            ):
                return True
        return False

    async def _has_better_choice(self, missing: Sequence[AgentClient], now_s: float) -> bool:
        """Whether enough other workers have become free since the gang was placed."""
        if now_s - self._looked_s < LOOK_AGAIN_S:
            return False
        self._looked_s = now_s
        taken = {link.worker.address for link in self.links}
        others = [
            worker
            for worker in await free_workers(self._client, self._plan.resources)
            if worker.address not in taken
        ]
        return len(others) >= len(missing)

    def _busy_text(self, missing: Sequence[AgentClient], waited_s: float) -> str:
        holders = "; ".join(
            link.worker.address
            + (
                f" is busy with {link.report.occupant.text}"
                if link.report and link.report.occupant
                else ""
            )
            for link in missing
        )
        return (
            f"gang {self._plan.name!r} has waited {waited_s:.0f} s for {len(missing)} of {len(self.links)} workers: {holders}"
            + (
                f"; needs the resources {dict(self._plan.resources)}"
                if self._plan.resources
                else ""
            )
        )

    async def _poll_until_all_reserved(self, link: AgentClient) -> None:
        while link.state != "reserved":
            await self._poll(link)
        if all(link.state == "reserved" for link in self.links):
            self._all_reserved.set()
        # An agent that has heard nothing from its caller for long takes it for lost.
        while not await self._are_all_reserved(STAY_IN_TOUCH_S):
            await self._poll(link)

    async def _are_all_reserved(self, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_reserved.wait(), wait_s)
        return self._all_reserved.is_set()

    async def _poll(self, link: AgentClient) -> None:
        await link.poll()
        if link.future.status in ("cancelled", "lost"):
            msg = f"gang {self._plan.name!r} was cancelled while it waited for its workers"
            raise GangCancelledError(msg)
        if link.future.status == "error":
            await link.future
        if link.report is not None and link.report.why_ended:
            raise AgentLostError(link.report.why_ended)


def _raise_first(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, AgentLostError):
                msg = f"{error} before the gang had started"
                raise WorkerLostError(msg) from error
            raise error
