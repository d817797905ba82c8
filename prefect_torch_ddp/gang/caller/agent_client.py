"""The caller's side of one agent: its Dask task, its news, orders to it, and its loss."""

import asyncio
import contextlib
import pickle
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from distributed import Client, Future

from prefect_torch_ddp.errors import (
    AgentLostError,
    GangError,
    NoAnswerError,
    SchedulerLostError,
    SchedulerUnresponsiveError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.caller.workers import look_for
from prefect_torch_ddp.gang.liveness import Liveness
from prefect_torch_ddp.gang.worker.agent import FAILED_GRACE_S, LOGS_TIMEOUT_S
from prefect_torch_ddp.protocol.messages import (
    POLL,
    AgentNews,
    AgentOrder,
    AgentState,
    StartOrder,
    WorkerIdentity,
)

LONG_POLL_S = 1.1
"""Just longer than the second after which rank 0 tells its progress: its polls bring that."""
MEMBERSHIP_S = 2.0
"""How often to check that a worker which owes an answer is still in the cluster."""
CLEAR_TIMEOUT_S = FAILED_GRACE_S + LOGS_TIMEOUT_S + 10.0
"""How long the end of a gang waits for an agent that still ends its ranks, and has their last lines
written."""
CLEAR_LIVENESS_S = 4.0
"""How long the end of a gang waits for a worker that doesn't answer; its ranks end by
themselves (`rank/link.py`)."""
NOTHING_HEARD = AgentNews("absent")


@dataclass
class AgentClient:
    """Talks to one agent.

    Every call raises AgentLostError once the worker is gone or was silent too long, and
    SchedulerLostError if the scheduler is.
    """

    client: Client
    worker: WorkerIdentity
    token: str
    future: "Future[Any]"
    next_event: int = 0
    news: AgentNews = NOTHING_HEARD
    """What was last heard."""
    is_lost: bool = False

    @property
    def was_dropped_by_client(self) -> bool:
        """Whether Dask's client let go of the agent, because it lost its scheduler for a time."""
        state = self.future._state  # noqa: SLF001 - nothing else tells this from a cancel
        reason = getattr(state.exception, "reason", "") if state is not None else ""
        return reason == "scheduler-connection-lost"

    @property
    def was_cancelled(self) -> bool:
        """Whether Dask cancelled the agent."""
        return self.future.status == "cancelled" and not self.was_dropped_by_client

    async def poll(self) -> AgentNews:
        """Wait for news, about a second at most, and return the news."""
        return await self._poll(LONG_POLL_S)

    async def give(self, order: AgentOrder | StartOrder) -> None:
        """Give the agent an order."""
        await self._call(0.0, pickle.dumps(order))

    async def start(self, order: StartOrder) -> None:
        """Have the agent start its ranks; raises WorkerLostError if it is lost."""
        try:
            await self.give(order)
        except AgentLostError as error:
            self.is_lost = True
            msg = f"{error} before its ranks had started"
            raise WorkerLostError(msg) from error

    async def clear(self) -> AgentNews:
        """End the agent with all its ranks; the news has no events that are known."""
        order: AgentOrder = "abort"
        return await self._poll(CLEAR_TIMEOUT_S, pickle.dumps(order), CLEAR_LIVENESS_S)

    async def _poll(
        self, wait_s: float, order: bytes = b"", limit_s: float | None = None
    ) -> AgentNews:
        news = await self._call(wait_s, order, limit_s)
        self.news, self.next_event = news, news.next_event
        return news

    async def ended(self) -> None:
        """Wait until its Dask task has ended in whatever way, or its worker is lost."""
        # Not result(): a fetch that is given up as it begins leaves the client unable to fetch
        # anything, with an UnboundLocalError (dask/distributed#8514).
        await self._while_alive(self.future.exception())

    async def values(self) -> tuple[bytes, ...]:
        """Return the values of the agent's ranks.

        Watches the worker meanwhile: Dask waits forever for an agent that was lost with its
        worker.
        """
        values: tuple[bytes, ...] = await self._while_alive(self.future.result())
        return values

    async def _while_alive(self, what: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(what)
        try:
            return await self._watched(task, Liveness())
        finally:
            task.cancel()

    async def _call(
        self, wait_s: float, order: bytes = b"", limit_s: float | None = None
    ) -> AgentNews:
        liveness = Liveness(limit_s)
        while True:
            call = asyncio.create_task(self._ask(self.news.state, wait_s, order))
            try:
                news: AgentNews = await self._watched(call, liveness)
            except NoAnswerError:
                await self._check_alive(liveness)
            else:
                return news
            finally:
                call.cancel()
            await asyncio.sleep(0.05)

    async def _watched(self, task: "asyncio.Future[Any]", liveness: Liveness) -> Any:
        # In turns: to a worker that just died Dask keeps connecting for 30 s.
        while not (await asyncio.wait({task}, timeout=min(MEMBERSHIP_S, liveness.look_left_s())))[
            0
        ]:
            await self._check_alive(liveness)
        return task.result()

    async def _check_alive(self, liveness: Liveness) -> None:
        if self.client.status != "running":
            msg = f"the scheduler was lost (the Dask client is {self.client.status})"
            raise SchedulerLostError(msg)
        try:
            found = await look_for(
                self.client, self.worker, min(MEMBERSHIP_S, liveness.look_left_s())
            )
        except SchedulerUnresponsiveError:
            if not liveness.look_left_s():
                raise
            return
        if found == "answers":
            liveness.heard()
        if found == "gone" and not await self._still_answers():
            msg = f"worker {self.worker.address} was lost"
            raise AgentLostError(msg)
        if not liveness.look_left_s():
            msg = f"worker {self.worker.address} was silent for {liveness.limit_s:g} s"
            raise AgentLostError(msg)

    async def _still_answers(self) -> bool:
        """Tell whether the agent of a worker that Dask has removed is still there.

        A retired worker lives on until its ranks have stopped and saved.
        """
        with contextlib.suppress(NoAnswerError, TimeoutError):
            news = await asyncio.wait_for(self._ask("absent", 0.0), MEMBERSHIP_S)
            return news.state != "absent"  # else another worker has come to its address
        return False

    async def _ask(self, known_state: AgentState, wait_s: float, order: bytes = b"") -> AgentNews:
        """Poll once, through the scheduler.

        Raises NoAnswerError if the worker can't be reached or lacks the handler, GangError if
        that fails.
        """
        if self.client.scheduler is None:
            msg = f"the Dask client is {self.client.status}"
            raise NoAnswerError(msg)
        address = self.worker.address
        message: dict[str, Any] = {"op": POLL, "token": self.token, "next_event": self.next_event}
        message |= {"known_state": known_state, "wait_s": wait_s, "order": order}
        try:
            answers = await self.client.scheduler.broadcast(
                msg=message, workers=[address], on_error="return_pickle"
            )
        except OSError as error:
            text = f"the scheduler did not answer ({type(error).__name__}: {error})"
            raise NoAnswerError(text) from error
        answer = answers[address]
        if isinstance(answer, dict) and "answer" in answer:
            news: AgentNews = pickle.loads(answer["answer"])
            return news
        if isinstance(answer, bytes):
            text = f"worker {address} did not answer ({pickle.loads(answer)!r})"
            raise NoAnswerError(text)
        text = f"worker {address} failed at {POLL!r}: {answer}"
        raise GangError(text)
