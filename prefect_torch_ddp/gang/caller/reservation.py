"""The reservation of a gang's workers: all or none, without two gangs waiting for each other."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

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
from prefect_torch_ddp.gang.caller.workers import WaitingSign, free_workers
from prefect_torch_ddp.gang.worker.agent import agent_key, run_agent
from prefect_torch_ddp.protocol.agent import WorkerIdentity

LOOK_AGAIN_S = 2.0
"""How often a waiting gang looks whether other workers have become free."""
MAX_HOLDERS = 4
"""How many busy workers a line names."""
STAY_IN_TOUCH_S = 2.0
"""How often an agent that is reserved is polled while others are still waited for."""


class GangReservation:
    """Reserves the workers of one attempt; runs on the client's event loop."""

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
        self.agents: list[AgentClient] = []
        self._all_reserved = asyncio.Event()
        self._looked_s = time.monotonic()

    async def reserve(self, queued_s: float, deadline_s: float | None, sign: WaitingSign) -> bool:
        """Start an agent on every worker and wait until each has its slot.

        The times are a monotonic clock's: since when the gang waits for slots, and until when.

        Returns False when the gang has to be placed anew: a more senior gang waits for one of
        its workers, or enough others have become free. Raises NotEnoughWorkersError, which says
        who held them, past the deadline.
        """
        self._submit()
        polls = [asyncio.create_task(self._poll_until_all_reserved(agent)) for agent in self.agents]
        try:
            while True:
                await asyncio.wait(polls, timeout=0.25)
                _raise_first(polls)
                missing = [agent for agent in self.agents if agent.report.state != "reserved"]
                if not missing:
                    return True
                now = time.monotonic()
                if deadline_s is not None and now >= deadline_s:
                    waited = f"gang {self._plan.name!r} has waited {now - queued_s:.0f} s"
                    num_all, holders = len(self.agents), self._holders(missing, len(missing))
                    msg = f"{waited} for {len(missing)} of {num_all} workers: {holders}"
                    raise NotEnoughWorkersError(msg)
                limit_s = None if deadline_s is None else deadline_s - queued_s
                sign.show(self._waiting_text(missing, now - queued_s, limit_s))
                if self._must_give_way(missing) or await self._has_better_choice(missing, now):
                    return False
        finally:
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    def _submit(self) -> None:
        for address in self._placement.workers:
            worker = self._workers[address]
            reservation = self._plan.reservation(worker, self._placement)
            # Pinned hard: with loose restrictions Dask may steal a waiting agent for another
            # worker. Not pure, never retried.
            future = self._client.submit(
                run_agent,
                reservation,
                key=agent_key(reservation.token),
                workers=[address],
                pure=False,
                retries=0,
                resources=self._plan.resources or None,
            )
            self.agents.append(AgentClient(self._client, worker, reservation.token, future))

    def _must_give_way(self, missing: Sequence[AgentClient]) -> bool:
        """Whether a more senior gang that also still waits holds one of our workers.

        It would wait for us as we for it.
        """
        for agent in missing:
            seniority = agent.report.occupant.seniority if agent.report.occupant else None
            if seniority is not None and seniority < self._plan.seniority:
                return True
        return False

    async def _has_better_choice(self, missing: Sequence[AgentClient], now_s: float) -> bool:
        if now_s - self._looked_s < LOOK_AGAIN_S:
            return False
        self._looked_s = now_s
        taken = {agent.worker.address for agent in self.agents}
        free = await free_workers(self._client, self._plan.resources)
        return sum(worker.address not in taken for worker in free) >= len(missing)

    def _waiting_text(
        self, missing: Sequence[AgentClient], waited_s: float, limit_s: float | None
    ) -> str:
        num_all = len(self.agents)
        limit = "no limit" if limit_s is None else f"limit {limit_s:g} s"
        return (
            f"waiting for workers: {num_all - len(missing)} of {num_all} after {waited_s:.0f} s "
            f"({limit}): {self._holders(missing, MAX_HOLDERS)}"
        )

    def _holders(self, missing: Sequence[AgentClient], most: int) -> str:
        plan = self._plan
        holders = []
        for agent in missing[:most]:
            known = agent.report.occupant
            holder = known.text if known else agent.worker.occupant  # as it was placed
            holders.append(agent.worker.address + (f" is busy with {holder}" if holder else ""))
        holders += [f"and {len(missing) - most} more"] if len(missing) > most else []
        wanted = ", ".join(f"{name}={amount:g}" for name, amount in plan.resources.items())
        needs = f"; needs the resources {wanted}" if wanted else ""
        return "; ".join(holders) + needs

    async def _poll_until_all_reserved(self, agent: AgentClient) -> None:
        while agent.report.state != "reserved":
            await self._poll(agent)
        if all(agent.report.state == "reserved" for agent in self.agents):
            self._all_reserved.set()
        # An agent that hears nothing from its caller for too long considers it lost.
        while not await self._are_all_reserved(STAY_IN_TOUCH_S):
            await self._poll(agent)

    async def _are_all_reserved(self, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_reserved.wait(), wait_s)
        return self._all_reserved.is_set()

    async def _poll(self, agent: AgentClient) -> None:
        await agent.poll()
        if agent.future.status in ("cancelled", "lost"):
            msg = f"gang {self._plan.name!r} was cancelled while it waited for its workers"
            raise GangCancelledError(msg)
        if agent.future.status == "error":
            await agent.future
        if agent.report.why_ended:
            raise AgentLostError(agent.report.why_ended)


def _raise_first(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, AgentLostError):
                msg = f"{error} before the gang had started"
                raise WorkerLostError(msg) from error
            raise error
