"""The reservation of a gang's workers: all or none, without two gangs waiting for each other."""

import asyncio
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
from prefect_torch_ddp.gang.caller.wanted import WorkersWanted
from prefect_torch_ddp.gang.caller.workers import WaitingSign, free_workers
from prefect_torch_ddp.gang.worker.agent import agent_key, run_agent
from prefect_torch_ddp.protocol.messages import WorkerIdentity

LOOK_AGAIN_S = 2.0
"""How often a waiting gang looks whether other workers have become free, and asks autoscalers for
others if not. A gang that ends leaves its workers to the next one within that time."""
MAX_HOLDERS = 4
"""How many busy workers a line names."""


class GangReservation:
    """Reserves the workers of one attempt; runs on the client's event loop."""

    def __init__(
        self,
        client: Client,
        plan: GangPlan,
        workers: Sequence[WorkerIdentity],
        placement: Placement,
        *,
        has_extra: bool = False,
    ) -> None:
        """Take the plan and the workers it was placed on; nothing is submitted yet.

        `has_extra`: it has more of them than it would wait for, since they were free.
        """
        self._client = client
        self._plan = plan
        self._placement = placement
        self._workers = workers
        self._has_extra = has_extra
        self.agents: list[AgentClient] = []
        self._looked_s = time.monotonic()

    async def reserve(
        self, queued_s: float, deadline_s: float | None, sign: WaitingSign, wanted: WorkersWanted
    ) -> bool:
        """Start an agent on every worker and wait until each has its slot.

        The times are a monotonic clock's: since when the gang waits for slots, and until when.

        Returns False when the gang has to be placed again: a more senior gang waits for one of
        its workers, enough others have become free, or another took one that it wanted only as
        long as it was free. Raises NotEnoughWorkersError, which says who held them, past the
        deadline.
        """
        self._submit()
        polls = [asyncio.create_task(self._poll_until_all_reserved(agent)) for agent in self.agents]
        limit = "no limit" if deadline_s is None else f"limit {deadline_s - queued_s:g} s"
        try:
            while True:
                first = asyncio.FIRST_COMPLETED
                done, _ = await asyncio.wait(polls, timeout=0.25, return_when=first)
                for poll in done:
                    poll.result()
                if done:
                    return True
                missing, now = self._missing(), time.monotonic()
                text = self._waiting_text(missing, f"{now - queued_s:.0f} s ({limit})")
                if deadline_s is not None and now >= deadline_s:
                    msg = f"gang {self._plan.name!r} gave up {text}"
                    raise NotEnoughWorkersError(msg)
                sign.show(text)
                if self._must_give_way(missing) or self._lost_extra(missing):
                    return False
                if await self._has_better_choice(missing, now, wanted):
                    return False
        finally:
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    def _submit(self) -> None:
        for worker in self._workers:
            reservation = self._plan.reservation(worker, self._placement)
            # Pinned hard: with loose restrictions Dask may steal a waiting agent for another
            # worker. Not pure, never retried.
            future = self._client.submit(
                run_agent,
                reservation,
                key=agent_key(reservation.token),
                workers=[worker.address],
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
            seniority = agent.news.occupant.seniority if agent.news.occupant else None
            if seniority is not None and seniority < self._plan.seniority:
                return True
        return False

    def _lost_extra(self, missing: Sequence[AgentClient]) -> bool:
        """Whether a worker that was free is held by now by somebody who doesn't wait himself."""
        holders = (agent.news.occupant for agent in missing)
        return self._has_extra and any(each and each.seniority is None for each in holders)

    async def _has_better_choice(
        self, missing: Sequence[AgentClient], now_s: float, wanted: WorkersWanted
    ) -> bool:
        if now_s - self._looked_s < LOOK_AGAIN_S:
            return False
        self._looked_s = now_s
        taken = {agent.worker.address for agent in self.agents}
        free = await free_workers(self._client, self._plan.resources)
        num_others = sum(worker.address not in taken for worker in free)
        if num_others < len(missing):
            await wanted.ask(len(missing) - num_others)
        return num_others >= len(missing)

    def _missing(self) -> list[AgentClient]:
        return [agent for agent in self.agents if agent.news.state != "reserved"]

    def _waiting_text(self, missing: Sequence[AgentClient], waited: str) -> str:
        holders = []
        for agent in missing[:MAX_HOLDERS]:
            known = agent.news.occupant
            holder = known.text if known else agent.worker.occupant  # as it was placed
            holders.append(agent.worker.address + (f" is busy with {holder}" if holder else ""))
        more = len(missing) - MAX_HOLDERS
        holders += [f"and {more} more"] if more > 0 else []
        wanted = ", ".join(f"{name}={amount:g}" for name, amount in self._plan.resources.items())
        holders += [f"needs the resources {wanted}"] if wanted else []
        found = f"{len(self.agents) - len(missing)} of {len(self.agents)} after {waited}"
        return f"waiting for workers: {found}: {'; '.join(holders)}"

    async def _poll_until_all_reserved(self, agent: AgentClient) -> None:
        # One that is reserved as well: it takes a caller from which it hears nothing for lost.
        while self._missing():
            lost: AgentLostError | None = None
            try:
                await agent.poll()
            except AgentLostError as error:
                lost = error
            if why := lost or agent.news.why_ended:
                msg = f"{why} before the gang had started"
                raise WorkerLostError(msg) from lost
            if agent.future.status in ("cancelled", "lost"):
                msg = f"gang {self._plan.name!r} was cancelled while it waited for its workers"
                raise GangCancelledError(msg)
            if agent.future.status == "error":
                await agent.future
