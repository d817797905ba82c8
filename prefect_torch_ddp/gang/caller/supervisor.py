"""Owns one run of a gang from the caller's side, once it is reserved: starts it, watches it,
and ends it whole.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from prefect_torch_ddp.errors import (
    AgentLostError,
    AgentRefusedError,
    GangCancelledError,
    GangError,
    SchedulerLostError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.caller.agent_client import CLEAR_TIMEOUT_S, AgentClient
from prefect_torch_ddp.gang.caller.hang_watch import HangWatch
from prefect_torch_ddp.gang.caller.placement import Placement
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.gang.caller.root_cause import (
    cancelled,
    early_return,
    equals_s,
    error_for,
    judge,
    settle_s,
    stopped_unasked,
)
from prefect_torch_ddp.gang.stop import StopSwitch
from prefect_torch_ddp.protocol.agent import Cleared, StartOrder
from prefect_torch_ddp.protocol.events import (
    FunctionEnded,
    GangEvent,
    RankFailedEvent,
    RankFailure,
    RankReturned,
    RankStack,
    RankStopped,
)
from prefect_torch_ddp.protocol.rank import RankPlace

logger = logging.getLogger(__name__)


class Supervision:
    """Runs on the client's event loop, for one attempt to run one gang."""

    def __init__(self, plan: GangPlan, placement: Placement, links: list[AgentClient]) -> None:
        """Take the agents, which may still be being taken; `clear` empties the list."""
        self._plan = plan
        self._placement = placement
        self._links = links
        self._failures: list[RankFailure] = []
        self._returned: list[int] = []
        self._ended: set[int] = set()
        self._stopped: list[RankStopped] = []
        self._broken: GangError | None = None
        self._hang = HangWatch(
            plan.progress_timeout_s, placement, from_start=plan.watched_from_start
        )
        self._over = False  # Python 3.11's asyncio.wait_for can swallow a cancellation; a watch ends by this all the same
        self._changed = asyncio.Event()

    async def run(self, sink: Callable[[GangEvent], None], stop: StopSwitch) -> list[bytes]:
        """Start the ranks on the agents taken and return their pickled values in rank order, or
        raise the one error.
        """
        store = self._links[0].report
        assert store is not None
        # At once: while one of them doesn't answer, the others would hear nothing from their
        # caller.
        await asyncio.gather(*(self._start(link, store.store_port) for link in self._links))
        watches = [asyncio.create_task(self._watch(link, sink)) for link in self._links]
        watches.append(asyncio.create_task(self._obey(stop)))
        try:
            await self._until_settled()
            self._raise_if_stopped(stop)
            if self._hang.stall is not None:
                await self._gather_stacks()
            if self._broken is not None:
                raise self._broken
            if self._hang.stall is not None:
                raise self._hang.error(self._plan.attempt)
            if self._failures:
                await self._settle()
                raise error_for(judge(self._failures, self._ended_places()), self._plan.attempt)
            if self._hang.early_return is not None:
                raise error_for(
                    early_return(self._ended_places(), self._hang.early_return), self._plan.attempt
                )
            for link in self._links:
                await link.leave()
            return await self._collect()
        finally:
            self._over = True
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _start(self, link: AgentClient, store_port: int) -> None:
        launches = self._plan.launches(self._placement, link.worker.address, store_port)
        await link.start(StartOrder(launches, self._plan.payload, self._plan.progress_timeout_s))

    async def _obey(self, stop: StopSwitch) -> None:
        """Ask the ranks to agree on a step and stop there, once the caller wants it."""
        await stop.wait()
        await asyncio.gather(*(link.give("stop") for link in self._links), return_exceptions=True)

    def _raise_if_stopped(self, stop: StopSwitch) -> None:
        """A training that stopped before its end is no success, and what fails while it stops
        no cause.
        """
        plan, stopped = self._plan, self._stopped
        if stop.why:
            raise cancelled(plan.name, f"by {stop.why}", stopped)
        was_cancelled = isinstance(self._broken, GangCancelledError)
        if was_cancelled or (stopped and not self._failures and self._broken is None):
            why_ended = next(
                (
                    link.report.why_ended
                    for link in self._links
                    if link.report and link.report.why_ended
                ),
                "",
            )
            places = self._placement.places
            raise stopped_unasked(plan, stopped, places, why_ended, was_cancelled=was_cancelled)

    def _ended_places(self) -> list[RankPlace]:
        return [place for place in self._placement.places if place.rank in self._ended]

    async def clear(self, sink: Callable[[GangEvent], None]) -> None:
        """End every agent with all its ranks; returns when they are gone, or their worker is,
        and their last lines passed on.
        """
        reachable = [link for link in self._links if not link.is_lost]
        calls = [link.clear() for link in reachable]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for link, answer in zip(reachable, answers, strict=True):
            if isinstance(answer, Cleared):
                for event in answer.events[max(0, link.next_event - answer.first_event) :]:
                    sink(event)
            if isinstance(answer, Cleared) and not answer.ended:
                logger.error(
                    "ranks on %s were not gone %g s after they were killed",
                    link.worker.address,
                    CLEAR_TIMEOUT_S,
                )
        for link in self._links:
            link.future.release()
        self._links.clear()

    async def _until_settled(self) -> None:
        size = self._placement.shape.world_size
        while (
            not (self._broken or self._failures or self._hang.has_found)
            and len(self._returned) < size
        ):
            await self._changed.wait()
            self._changed.clear()

    async def _gather_stacks(self) -> None:
        """Have every rank say where it is.

        What fails from now on, woken by the signal for it, is not the cause.
        """
        asked_s = time.monotonic()
        for look in [asyncio.create_task(link.give("look")) for link in self._links]:
            with contextlib.suppress(AgentLostError):
                await look
        while self._broken is None and self._hang.lacks_stacks(asked_s):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), 0.5)
            self._changed.clear()

    async def _settle(self) -> None:
        """Give the cause a moment to show while all that was seen are consequences, then its
        equals on other ranks.
        """
        size = self._placement.shape.world_size
        await self._wait(lambda: settle_s(self._failures, len(self._ended), size))
        await self._wait(lambda: equals_s(self._failures, len(self._ended), size))

    async def _wait(self, limit_s: Callable[[], float]) -> None:
        """Wait for news as long as the limit says, which news may change."""
        started = time.monotonic()
        while (left := started + limit_s() - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return
            self._changed.clear()

    async def _watch(self, link: AgentClient, sink: Callable[[GangEvent], None]) -> None:
        """Pass on one agent's events until it ends; its loss is a failure of its ranks."""
        places = self._placement.ranks_of(link.worker.address)
        try:
            await self._pass_on(link, sink)
        except AgentLostError as error:
            link.is_lost = True
            for place in places:
                self._note(RankFailedEvent(_lost_failure(place.rank, place.host, str(error))))
            return
        except SchedulerLostError as error:
            for each in self._links:
                each.is_lost = True  # there is no way to the others either
            self._broken = error
            self._changed.set()
            return
        except Exception as error:  # noqa: BLE001 - a watch that ended unseen would leave the caller waiting for ever
            self._broken = GangError(
                f"the agent on {link.worker.address} could not be watched: {error!r}"
            )
            self._broken.__cause__ = error
            self._changed.set()
            return
        if not self._failures and not {place.rank for place in places} <= set(self._returned):
            self._broken = await self._why_gone(link)
            self._changed.set()

    async def _pass_on(self, link: AgentClient, sink: Callable[[GangEvent], None]) -> None:
        while link.state != "ended" and not self._over:
            news = await link.poll()
            for event in news.events:
                self._note(event)
                sink(event)
            if self._hang.take(news.heartbeats, sink):
                self._changed.set()
            # An agent that Dask cancelled winds its ranks down, and tells of it.
            if link.future.status not in ("pending", "cancelled") or link.was_dropped_by_client:
                break

    async def _why_gone(self, link: AgentClient) -> GangError:
        """Tell why an agent ended that nobody told to."""
        if (
            link.state != "ended"
        ):  # its task's end was heard of first, as by a caller that was stopped meanwhile
            with contextlib.suppress(AgentLostError, GangError):
                await link.poll()
        if link.report is not None and link.report.why_ended:
            return WorkerLostError(f"{link.report.why_ended}; the rest of the gang was stopped")
        for _ in range(20):  # the agent's end is heard of before its task's
            if link.future.status != "pending":
                break
            await asyncio.sleep(0.1)
        if link.future.status == "error":
            return GangError(
                f"the agent on {link.worker.address} failed: {await link.future.exception()!r}"
            )
        if link.was_dropped_by_client:
            return SchedulerLostError(
                "the connection to the scheduler was lost, and with it the gang"
            )
        return GangCancelledError(
            f"gang {self._plan.name!r} was cancelled from outside; its ranks were stopped"
        )

    def _note(self, event: GangEvent) -> None:
        if isinstance(event, RankFailedEvent):
            self._failures.append(event.failure)
        elif isinstance(event, RankReturned):
            self._returned.append(event.rank)
            self._ended.add(event.rank)
        elif isinstance(event, FunctionEnded):
            self._ended.add(event.rank)
            self._hang.add_end(event.rank)
        elif isinstance(event, RankStopped):
            self._stopped.append(event)
        elif isinstance(event, RankStack):
            self._hang.add_stack(event)
        else:
            return
        self._changed.set()

    async def _collect(self) -> list[bytes]:
        """Fetch the values at once: while Dask holds them, a lost worker would make it run the
        agent again.
        """
        values: list[bytes] = []
        for link in self._links:
            try:
                part = await link.values()
            except (AgentLostError, AgentRefusedError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and link.future.status != "cancelled":
                    raise
                msg = f"worker {link.worker.address} was lost after its ranks had returned, with their values"
                raise WorkerLostError(msg) from error
            if not part:
                msg = f"the agent on {link.worker.address} was cancelled from outside"
                raise GangCancelledError(msg)
            values += part
        return values


def _lost_failure(rank: int, host: str, summary: str) -> RankFailure:
    return RankFailure(rank=rank, host=host, pid=0, kind="worker_lost", summary=summary)
