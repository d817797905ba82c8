"""Owns one run of a gang from the caller's side: seats it, starts it, watches it, and ends it whole."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from distributed import Client

from prefect_torch_ddp.errors import GangCancelledError, GangError, NotEnoughWorkersError, WorkerLostError
from prefect_torch_ddp.gang.orders import Cleared, StartOrder, WorkerIdentity
from prefect_torch_ddp.gang.placement import Placement
from prefect_torch_ddp.gang.plan import GangPlan
from prefect_torch_ddp.gang.seat import SeatRefusedError, occupy_seat, seat_key
from prefect_torch_ddp.gang.seat_link import CLEAR_TIMEOUT_S, SeatLink, SeatLostError
from prefect_torch_ddp.gang.verdict import SETTLE_S, error_for, has_suspect, judge
from prefect_torch_ddp.gang.workers import free_workers
from prefect_torch_ddp.messages import GangEvent, RankFailedEvent, RankFailure, RankReturned

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0
"""How often a waiting gang looks whether other workers than the chosen ones have become free."""
WAIT_MESSAGE_S = 10.0
"""How often the caller is told for whom its gang waits."""


class Supervision:
    """Runs on the client's event loop, for one attempt to run one gang."""

    def __init__(self, client: Client, plan: GangPlan, workers: Sequence[WorkerIdentity], placement: Placement) -> None:
        """Take the plan and the workers it was placed on; nothing is submitted yet."""
        self._client = client
        self._plan = plan
        self._placement = placement
        self._workers = {worker.address: worker for worker in workers}
        self._links: list[SeatLink] = []
        self._failures: list[RankFailure] = []
        self._returned: list[int] = []
        self._looked_s = time.monotonic()
        self._broken: GangError | None = None
        self._over = False  # Python 3.11's asyncio.wait_for can swallow a cancellation; a watch ends by this all the same
        self._changed = asyncio.Event()

    async def seat(self, deadline_s: float | None, say: Callable[[str], None]) -> bool:
        """Take all seats, or none; False when a more senior gang or a better choice of workers made it give way.

        Raises:
            NotEnoughWorkersError: the workers stayed busy past the deadline (of `time.monotonic`); says who held them.
        """
        self._submit()
        started = last_said = time.monotonic()
        polls = [asyncio.create_task(self._poll_until(link, {"seated"})) for link in self._links]
        try:
            while True:
                _, pending = await asyncio.wait(polls, timeout=0.25)
                _raise_first(polls)
                if not pending:
                    return True
                missing = [link for link in self._links if link.state != "seated"]
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
            ticket = self._plan.ticket(worker, hosts_store=address == first_worker)
            # Pinned hard: with loose restrictions Dask may steal a waiting seat for another worker. Not pure, never retried.
            future = self._client.submit(
                occupy_seat,
                ticket,
                key=seat_key(ticket.token),
                workers=[address],
                pure=False,
                retries=0,
                resources=dict(self._plan.resources) or None,
            )
            self._links.append(SeatLink(self._client, worker, ticket.token, future))

    def _must_give_way(self, missing: Sequence[SeatLink]) -> bool:
        """Whether a more senior gang that also still waits holds one of our seats: it would wait for us as we for it."""
        for link in missing:
            holder = link.news.occupant if link.news else None
            if holder is not None and holder.seniority is not None and holder.seniority < self._plan.seniority:
                return True
        return False

    async def _has_better_choice(self, missing: Sequence[SeatLink], now_s: float) -> bool:
        """Whether enough other workers have become free since the gang was placed."""
        if now_s - self._looked_s < LOOK_AGAIN_S:
            return False
        self._looked_s = now_s
        taken = {link.worker.address for link in self._links}
        others = [worker for worker in await free_workers(self._client) if worker.address not in taken]
        return len(others) >= len(missing)

    def _busy_text(self, missing: Sequence[SeatLink], waited_s: float) -> str:
        holders = "; ".join(
            link.worker.address + (f" is busy with {link.news.occupant.text}" if link.news and link.news.occupant else "")
            for link in missing
        )
        return (
            f"gang {self._plan.name!r} has waited {waited_s:.0f} s for {len(missing)} of {len(self._links)} workers: {holders}"
            + (f"; needs the resources {dict(self._plan.resources)}" if self._plan.resources else "")
        )

    async def run(self, sink: Callable[[GangEvent], None]) -> list[bytes]:
        """Start the ranks on the seats taken and return their pickled values in rank order, or raise the one error."""
        store = self._links[0].news
        assert store is not None
        for link in self._links:
            launches = self._plan.launches(self._placement, link.worker.address, store.store_port)
            await link.give_or_raise("before its ranks had started", order=StartOrder(launches))
        watches = [asyncio.create_task(self._watch(link, sink)) for link in self._links]
        try:
            await self._until_settled()
            if self._broken is not None:
                raise self._broken
            if self._failures:
                await self._settle()
                returned = [place for place in self._placement.places if place.rank in self._returned]
                raise error_for(judge(self._failures, returned), self._plan.attempt)
            for link in self._links:
                await link.give_or_raise("after its ranks had returned, with their values", leave=True)
            return await self._collect()
        finally:
            self._over = True
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def stop(self) -> None:
        """Ask the ranks to agree on a step and stop there."""
        await asyncio.gather(*(link.give(stop=True) for link in self._links), return_exceptions=True)

    async def clear(self, sink: Callable[[GangEvent], None]) -> None:
        """End every seat with all its ranks; returns when they are gone, or their worker is, and their last lines passed on."""
        reachable = [link for link in self._links if not link.is_lost]
        calls = [link.clear() for link in reachable]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for link, answer in zip(reachable, answers, strict=True):
            if isinstance(answer, Cleared):
                for event in answer.events[max(0, link.next_event - answer.first_event) :]:
                    sink(event)
            if isinstance(answer, Cleared) and not answer.ended:
                logger.error("ranks on %s were not gone %g s after they were killed", link.worker.address, CLEAR_TIMEOUT_S)
        for link in self._links:
            link.future.release()
        self._links = []

    async def _until_settled(self) -> None:
        while self._broken is None and not self._failures and len(self._returned) < self._placement.shape.world_size:
            await self._changed.wait()
            self._changed.clear()

    async def _settle(self) -> None:
        """Give the cause a moment to show while all that was seen are consequences."""
        deadline = time.monotonic() + SETTLE_S
        while not has_suspect(self._failures) and (left := deadline - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return
            self._changed.clear()

    async def _watch(self, link: SeatLink, sink: Callable[[GangEvent], None]) -> None:
        """Pass on one seat's events until it ends; its loss is a failure of its ranks."""
        places = self._placement.ranks_of(link.worker.address)
        try:
            while link.state != "ended" and not self._over:
                news = await link.poll()
                for event in news.events:
                    self._note(event)
                    sink(event)
                if link.future.status != "pending":
                    break
        except SeatLostError as error:
            link.is_lost = True
            for place in places:
                self._note(RankFailedEvent(_lost_failure(place.rank, place.host, str(error))))
            return
        except Exception as error:  # noqa: BLE001 - a watch that ended unseen would leave the caller waiting for ever
            self._broken = GangError(f"the seat on {link.worker.address} could not be watched: {error!r}")
            self._broken.__cause__ = error
            self._changed.set()
            return
        if not self._failures and not {place.rank for place in places} <= set(self._returned):
            self._broken = await self._why_gone(link)
            self._changed.set()

    async def _why_gone(self, link: SeatLink) -> GangError:
        """Tell why a seat ended that nobody told to."""
        for _ in range(20):  # the seat's end is heard of before its task's
            if link.future.status != "pending":
                break
            await asyncio.sleep(0.1)
        if link.future.status == "error":
            return GangError(f"the seat on {link.worker.address} failed: {await link.future.exception()!r}")
        return GangCancelledError(f"gang {self._plan.name!r} was cancelled from outside; its ranks were stopped")

    def _note(self, event: GangEvent) -> None:
        if isinstance(event, RankFailedEvent):
            self._failures.append(event.failure)
        elif isinstance(event, RankReturned):
            self._returned.append(event.rank)
        else:
            return
        self._changed.set()

    async def _collect(self) -> list[bytes]:
        """Fetch the values at once: while Dask holds them, a lost worker would make it run the seat again."""
        values: list[bytes] = []
        for link in self._links:
            try:
                part = await link.values()
            except (SeatLostError, SeatRefusedError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and link.future.status != "cancelled":
                    raise
                msg = f"worker {link.worker.address} was lost after its ranks had returned, with their values"
                raise WorkerLostError(msg) from error
            if not part:
                msg = f"the seat on {link.worker.address} was cancelled from outside"
                raise GangCancelledError(msg)
            values += part
        return values

    async def _poll_until(self, link: SeatLink, states: set[str]) -> None:
        while link.state not in states:
            await link.poll()
            if link.future.status in ("cancelled", "lost"):
                msg = f"gang {self._plan.name!r} was cancelled while it waited for its workers"
                raise GangCancelledError(msg)
            if link.future.status == "error":
                await link.future


def _lost_failure(rank: int, host: str, summary: str) -> RankFailure:
    return RankFailure(rank=rank, host=host, pid=0, kind="worker_lost", summary=summary)


def _raise_first(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, SeatLostError):
                msg = f"{error} before the gang had started"
                raise WorkerLostError(msg) from error
            raise error
