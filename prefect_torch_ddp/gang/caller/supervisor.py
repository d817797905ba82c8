"""The supervisor of a reserved gang: it starts all ranks, watches them, and ends them together."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from typing import Literal

from prefect_torch_ddp.errors import (
    AgentLostError,
    AgentRefusedError,
    GangCancelledError,
    GangError,
    SchedulerLostError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.caller.agent_client import (
    CLEAR_LIVENESS_S,
    CLEAR_TIMEOUT_S,
    AgentClient,
)
from prefect_torch_ddp.gang.caller.growth import Growth
from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.gang.caller.stop import StopSwitch
from prefect_torch_ddp.gang.caller.verdict.early_stop import EarlyStop
from prefect_torch_ddp.gang.caller.verdict.hang import HangWatch
from prefect_torch_ddp.gang.caller.verdict.root_cause import (
    early_return,
    error_for,
    identical_s,
    judge,
    settle_s,
)
from prefect_torch_ddp.protocol.events import (
    NO_RANK,
    FunctionEnded,
    GangEvent,
    LogLine,
    RankFailure,
    RankReturned,
    RankStack,
    RankStopped,
)
from prefect_torch_ddp.protocol.rank import RankPlace

logger = logging.getLogger(__name__)

Sink = Callable[[GangEvent], None]

PROOF_S = 2.0
"""Between two looks at ranks that seem to wait in vain."""
MAX_PAUSE_S = 60.0
"""Between two looks at ranks that work after others have ended."""


class Supervisor:
    """Runs one attempt of one gang, on the client's event loop."""

    def __init__(
        self, plan: GangPlan, placement: Placement, agents: list[AgentClient], growth: Growth
    ) -> None:
        """Take the agents, which may still be being reserved; `clear` empties the list."""
        self._plan = plan
        self._placement = placement
        self._agents = agents
        self._growth = growth
        self._failures: list[RankFailure] = []
        self._returned: set[int] = set()
        self._ended: set[int] = set()
        self._stopped: list[RankStopped] = []
        self._broken: GangError | None = None
        limit_s = plan.options.progress_timeout_s
        self._hang = HangWatch(limit_s, placement, from_start=plan.watched_from_start)
        self._changed = asyncio.Event()
        self._looking = asyncio.Lock()

    async def run(self, sink: Sink, stop: StopSwitch) -> list[bytes]:
        """Start the ranks and return their pickled values in rank order, or raise the error."""
        port = self._agents[0].news.store_port
        # At once: while one of them doesn't answer, the others would hear nothing.
        await asyncio.gather(
            *(
                agent.start(self._plan.start_order(self._placement, agent.worker.address, port))
                for agent in self._agents
            )
        )
        watches = [asyncio.create_task(self._watch(agent, sink)) for agent in self._agents]
        watches.append(asyncio.create_task(self._obey(stop)))
        watches.append(asyncio.create_task(self._grow()))
        watches.append(asyncio.create_task(self._look_for_vain_waits()))
        try:
            await self._until_settled(sink)
            await self._raise_if_broken(stop)
            # At once: while Dask holds values, a lost worker would make it run the agent again.
            parts = await asyncio.gather(*(self._values_of(each, sink) for each in self._agents))
            return [value for part in parts for value in part]
        finally:
            pending = set(watches)
            while pending:  # Python 3.11's asyncio.wait_for can swallow a cancellation
                for watch in pending:
                    watch.cancel()
                _, pending = await asyncio.wait(pending, timeout=1.0)
            await asyncio.gather(*watches, return_exceptions=True)

    async def clear(self, sink: Sink) -> None:
        """End every agent; returns when its ranks, or its worker, are gone."""
        reachable = [agent for agent in self._agents if not agent.is_lost]
        calls = [agent.clear() for agent in reachable]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for agent, answer in zip(reachable, answers, strict=True):
            if isinstance(answer, BaseException):
                continue
            for event in answer.events:
                sink(event)
            if not answer.has_ended:
                text = "ranks on %s were not gone %g s after they were killed"
                logger.error(text, agent.worker.address, CLEAR_TIMEOUT_S)
        if self._growth.why:  # the agents' tasks still hold their workers for a moment
            ends = asyncio.gather(*(each.ended() for each in reachable), return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ends, CLEAR_LIVENESS_S)
        for agent in self._agents:
            agent.future.release()
        self._agents.clear()

    async def _obey(self, stop: StopSwitch) -> None:
        await stop.wait()
        orders = [agent.give("stop") for agent in self._agents]
        await asyncio.gather(*orders, return_exceptions=True)

    async def _grow(self) -> None:
        await self._growth.until_due()
        # Not by "stop": a gang that does well isn't killed for a step that takes long.
        orders = [agent.give("pause") for agent in self._agents]
        await asyncio.gather(*orders, return_exceptions=True)

    async def _until_settled(self, sink: Sink) -> None:
        size = self._placement.shape.world_size
        while not (self._broken or self._failures):
            if len(self._returned) == size:
                return
            if self._hang.has_found:
                if await self._is_confirmed(sink):
                    return
                continue  # the look waits for news too, and has taken those that came meanwhile
            await self._news()

    async def _news(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()

    async def _raise_if_broken(self, stop: StopSwitch) -> None:
        attempt = self._plan.attempt
        if self._failures and not self._broken:
            if not stop.why:
                await self._settle()
            await self._wait(lambda: self._early_stop(stop).settle_s(stop.grace_s))
        error = self._early_stop(stop).error(self._plan, self._placement.places)
        if error is not None:
            raise error
        if self._broken is not None:
            raise self._broken
        if self._hang.stall is not None:
            raise self._hang.error(attempt)
        if self._failures:
            raise error_for(judge(self._failures, self._ended_places()), attempt)
        if self._hang.waits_in_vain is not None:
            cause = early_return(self._ended_places(), self._hang.waits_in_vain)
            raise error_for([cause], attempt)

    def _early_stop(self, stop: StopSwitch) -> EarlyStop:
        return EarlyStop(
            stopped=self._stopped,
            failures=self._failures,
            returned=self._returned,
            why_asked=stop.why,
            why_grows=self._growth.why,
            why_agent_ended=next(filter(None, (each.news.why_ended for each in self._agents)), ""),
            has_cancelled_agent=any(agent.was_cancelled for agent in self._agents),
            broken=self._broken,
        )

    def _ended_places(self) -> Sequence[RankPlace]:
        return [place for place in self._placement.places if place.rank in self._ended]

    async def _is_confirmed(self, sink: Sink) -> bool:
        """Tell whether the stacks leave a gang without progress no excuse."""
        if self._hang.stall is not None:
            async with self._looking:
                await self._gather_stacks("look_by_signal")
            if why := self._hang.excuse():
                sink(LogLine(NO_RANK, logging.WARNING, why))
        for _, stack in sorted(self._hang.looks.newest.items()) if self._hang.has_found else ():
            sink(stack)
        return self._hang.has_found

    async def _look_for_vain_waits(self) -> None:
        """Look at the ranks that remain after another one's end, less and less often."""
        pause_s, num_ended = PROOF_S, 0
        while True:
            await asyncio.sleep(PROOF_S)
            if not self._hang.suspects_vain_wait or len(self._ended) != num_ended:
                pause_s, num_ended = PROOF_S, len(self._ended)
            if not self._hang.suspects_vain_wait or self._hang.has_found:
                continue
            async with self._looking:
                await self._gather_stacks("look")
                if self._hang.may_wait_in_vain:
                    await asyncio.sleep(PROOF_S)
                    await self._gather_stacks("look")
                    self._hang.judge_vain_wait()
                    self._changed.set()
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    async def _gather_stacks(self, how: Literal["look", "look_by_signal"]) -> None:
        self._hang.looks.begin()
        # What fails from now on, woken by the signal for it, is not the cause.
        asked_s = time.monotonic()
        for look in [asyncio.create_task(agent.give(how)) for agent in self._agents]:
            with contextlib.suppress(AgentLostError):
                await look
        while self._broken is None and self._hang.lacks_stacks(asked_s):
            await self._news(0.5)

    async def _settle(self) -> None:
        """Wait shortly for the cause, then for identical failures of other ranks."""
        size = self._placement.shape.world_size
        await self._wait(lambda: settle_s(self._failures, len(self._ended), size))
        await self._wait(lambda: identical_s(self._failures, len(self._ended), size))

    async def _wait(self, limit_s: Callable[[], float]) -> None:
        """Wait until the limit, which news may change, has passed."""
        started = time.monotonic()
        while (left_s := started + limit_s() - time.monotonic()) > 0:
            await self._news(left_s)

    async def _watch(self, agent: AgentClient, sink: Sink) -> None:
        """Pass on one agent's events until it ends; its loss is a failure of its ranks."""
        places = self._placement.ranks_of(agent.worker.address)
        try:
            await self._pass_on(agent, sink)
            if not self._failures and not {place.rank for place in places} <= self._returned:
                self._break(await self._why_gone(agent, sink))
        except AgentLostError as error:
            agent.is_lost = True
            for place in places:
                lost = RankFailure(place.rank, place.host, 0, "worker_lost", str(error))
                self._note(lost)
        except SchedulerLostError as error:
            for each in self._agents:
                each.is_lost = True  # there is no way to the others either
            self._break(error)
        except Exception as error:  # noqa: BLE001 - unseen, the caller would wait forever
            msg = f"the agent on {agent.worker.address} could not be watched: {error!r}"
            broken = GangError(msg)
            broken.__cause__ = error
            self._break(broken)

    def _break(self, error: GangError) -> None:
        self._broken = error
        self._changed.set()

    async def _pass_on(self, agent: AgentClient, sink: Sink) -> None:
        while agent.news.state != "ended":
            await self._poll(agent, sink)
            # An agent that Dask cancelled shuts its ranks down, and reports that.
            if agent.future.status not in ("pending", "cancelled") or agent.was_dropped_by_client:
                break

    async def _poll(self, agent: AgentClient, sink: Sink) -> None:
        news = await agent.poll()
        for event in news.events:
            self._note(event)
            if not isinstance(event, RankStack):  # of a mere suspicion, perhaps
                sink(event)
        if self._hang.take(news.heartbeats, sink) or news.why_ended:
            self._changed.set()

    async def _why_gone(self, agent: AgentClient, sink: Sink) -> GangError:
        """Tell why an agent ended unasked."""
        if agent.news.state != "ended":  # its task's end was heard of first
            with contextlib.suppress(AgentLostError, GangError):
                await self._poll(agent, sink)
        if agent.news.why_ended:
            return WorkerLostError(f"{agent.news.why_ended}; the rest of the gang was stopped")
        for _ in range(20):  # the agent's end is heard of before its task's
            if agent.future.status != "pending":
                break
            await asyncio.sleep(0.1)
        if agent.future.status == "error":
            error = await agent.future.exception()
            return GangError(f"the agent on {agent.worker.address} failed: {error!r}")
        if agent.was_dropped_by_client:
            msg = "the connection to the scheduler was lost, and with it the gang"
            return SchedulerLostError(msg)
        return GangCancelledError(
            f"gang {self._plan.name!r} was cancelled from outside; its ranks were stopped"
        )

    def _note(self, event: GangEvent) -> None:
        self._growth.take(event)
        match event:
            case RankFailure():
                self._failures.append(event)
            case RankReturned(rank):
                self._returned.add(rank)
                self._ended.add(rank)
            case FunctionEnded(rank):
                self._ended.add(rank)
                self._hang.add_end(rank)
            case RankStopped():
                self._stopped.append(event)
            case RankStack():
                self._hang.looks.add(event)
            case _:
                return
        self._changed.set()

    async def _values_of(self, agent: AgentClient, sink: Sink) -> tuple[bytes, ...]:
        address = agent.worker.address
        try:
            await agent.give("leave")
            part = await agent.values()
        except FutureCancelledError:  # Dask's own, which is no asyncio.CancelledError
            raise await self._why_gone(agent, sink) from None
        except (AgentLostError, AgentRefusedError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and agent.future.status != "cancelled":
                raise
            agent.is_lost = isinstance(error, AgentLostError)
            msg = (
                f"worker {address} was lost after its ranks had returned, and their values with it"
            )
            raise WorkerLostError(msg) from error
        if not part:  # cancelled, or it left because its worker closes or its caller was silent
            raise await self._why_gone(agent, sink)
        return part
