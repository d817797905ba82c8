"""Owns the caller's end of one agent: its Dask task, its news, and the orders that reach it."""

import asyncio
import pickle
from dataclasses import dataclass
from typing import Any

from distributed import Client, Future

from prefect_torch_ddp.errors import (
    AgentLostError,
    NoAnswerError,
    SchedulerLostError,
    SchedulerUnresponsiveError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.caller.workers import look_for
from prefect_torch_ddp.gang.liveness import LIVENESS_TIMEOUT_S, Liveness
from prefect_torch_ddp.gang.worker.rpc import CLEAR_OP, GIVE_OP, POLL_OP, call_worker
from prefect_torch_ddp.protocol.agent import AgentReport, AgentState, Cleared, WorkerIdentity

LONG_POLL_S = 1.0
MEMBERSHIP_S = 2.0
"""How often a worker that owes an answer is looked up in the cluster."""
CLEAR_TIMEOUT_S = 10.0
CLEAR_LIVENESS_S = 4.0
"""How long the end of a gang waits for a worker that doesn't answer; its ranks end by
themselves (`rank/link.py`)."""


@dataclass
class AgentClient:
    """Talks to one agent.

    Every call raises AgentLostError once its worker is gone or was silent too long,
    SchedulerLostError where the scheduler is.
    """

    client: Client
    worker: WorkerIdentity
    token: str
    future: "Future[Any]"
    next_event: int = 0
    news: AgentReport | None = None
    is_lost: bool = False

    @property
    def state(self) -> AgentState:
        """How far the agent is, as last heard."""
        return self.news.state if self.news else "absent"

    @property
    def was_dropped_by_client(self) -> bool:
        """Whether Dask's client let go of the agent, because it lost the scheduler and found
        it, or another, again.
        """
        state = self.future._state
        return (
            state is not None
            and getattr(state.exception, "reason", "") == "scheduler-connection-lost"
        )

    async def poll(self) -> AgentReport:
        """Wait for news, at most a second, and return it."""
        known, next_event = self.state, self.next_event
        news: AgentReport = await self._call(
            POLL_OP, next_event=next_event, known_state=known, wait_s=LONG_POLL_S
        )
        self.news, self.next_event = news, news.next_event
        return news

    async def give(self, **order: Any) -> None:
        """Hand the agent an order."""
        await self._call(GIVE_OP, order=pickle.dumps(order))

    async def give_or_raise(self, when: str, **order: Any) -> None:
        """Hand the agent an order; a lost agent is the caller's WorkerLostError, which says
        when that was.
        """
        try:
            await self.give(**order)
        except AgentLostError as error:
            self.is_lost = True
            msg = f"{error} {when}"
            raise WorkerLostError(msg) from error

    async def values(self) -> tuple[bytes, ...]:
        """Return the values of the agent's ranks; an agent whose worker was lost with them
        waits in Dask for ever, so look.
        """
        fetch: asyncio.Task[tuple[bytes, ...]] = asyncio.create_task(self._fetch())
        liveness = Liveness()  # of the worker: big values may take their time
        try:
            while not (await asyncio.wait({fetch}, timeout=MEMBERSHIP_S))[0]:
                await self._check_alive(liveness)
            return fetch.result()
        finally:
            fetch.cancel()

    async def _fetch(self) -> tuple[bytes, ...]:
        values: tuple[bytes, ...] = await self.future
        return values

    async def clear(self) -> Cleared:
        """End the agent with all its ranks; returns when they are gone."""
        cleared: Cleared = await self._call(CLEAR_OP, CLEAR_LIVENESS_S, timeout_s=CLEAR_TIMEOUT_S)
        return cleared

    async def _call(self, op: str, silence_s: float = LIVENESS_TIMEOUT_S, /, **message: Any) -> Any:
        liveness = Liveness(silence_s)
        while True:
            call = asyncio.create_task(
                call_worker(self.client, self.worker.address, op, token=self.token, **message)
            )
            try:
                # In turns: to a worker that just died Dask goes on connecting for 30 s.
                while not (await asyncio.wait({call}, timeout=min(MEMBERSHIP_S, liveness.left_s)))[
                    0
                ]:
                    await self._check_alive(liveness)
                return call.result()
            except NoAnswerError:
                await self._check_alive(liveness)
            finally:
                call.cancel()
            await asyncio.sleep(0.05)

    async def _check_alive(self, liveness: Liveness) -> None:
        """Raise where the worker or the scheduler is gone, or silent for too long."""
        if self.client.status != "running":
            msg = f"the scheduler was lost (the Dask client is {self.client.status})"
            raise SchedulerLostError(msg)
        try:
            found = await look_for(self.client, self.worker, min(MEMBERSHIP_S, liveness.left_s))
        except SchedulerUnresponsiveError:
            if not liveness.left_s:
                raise
            return
        if found == "answers":
            liveness.heard()
        if found == "gone":
            msg = f"worker {self.worker.address} was lost"
            raise AgentLostError(msg)
        if not liveness.left_s:
            msg = f"worker {self.worker.address} was silent for {LIVENESS_TIMEOUT_S:g} s"
            raise AgentLostError(msg)
