"""Owns one attempt of a gang: gather, place, agent, run, end; on the client's event loop."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from distributed import Client

from prefect_torch_ddp.errors import WorkerLostError
from prefect_torch_ddp.gang.caller.placement import choose, num_workers_needed, place
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.gang.caller.reservation import GangReservation
from prefect_torch_ddp.gang.caller.supervisor import Supervision
from prefect_torch_ddp.gang.caller.workers import WorkersNeeded, gather_workers
from prefect_torch_ddp.gang.stop import StopSwitch
from prefect_torch_ddp.protocol.agent import WorkerIdentity
from prefect_torch_ddp.protocol.events import NO_RANK, AttemptBegan, GangEvent, LogLine


@dataclass(frozen=True)
class Waits:
    """How long a gang waits for workers."""

    workers_timeout_s: float
    """Until there are enough."""
    queue_timeout_s: float | None
    """Until they are free."""
    full_size_s: float
    """Until there are enough for all ranks, when there are enough for the fewest already."""


@dataclass(frozen=True)
class GangSize:
    """How many ranks a gang may have."""

    most: int | None
    """None: as many as there is room for."""
    fewest: int | None
    """None: no fewer than the most."""
    ranks_per_worker: int
    divides: int | None = None
    """A number that every size divides; None: any size will do."""

    def on(self, num_workers: int) -> int:
        """Return the size that so many workers give."""
        room = num_workers * self.ranks_per_worker
        size = room if self.most is None else min(self.most, room)
        while self.divides is not None and self.divides % size:
            size -= 1
        return size

    @property
    def workers_for_all(self) -> int:
        """How many workers hold all ranks; at least one where that number is open."""
        return num_workers_needed(self.most or self.fewest or 1, self.ranks_per_worker)

    @property
    def workers_for_fewest(self) -> int:
        """How many workers hold the fewest ranks."""
        fewest = self.fewest or self.most or 1
        while self.divides is not None and self.divides % fewest:
            fewest += 1
        return num_workers_needed(fewest, self.ranks_per_worker)


async def drive(  # noqa: PLR0913 - the loop over attempts to take agents needs all of run_gang's choices
    client: Client,
    plan: GangPlan,
    size: GangSize,
    waits: Waits,
    *,
    sink: Callable[[GangEvent], None],
    stop: StopSwitch,
) -> list[bytes]:
    """Return the pickled values of the ranks, in rank order."""
    queue_deadline_s: float | None = None
    while True:
        workers = await _gather(client, plan, size, waits)
        if waits.queue_timeout_s is not None and queue_deadline_s is None:
            queue_deadline_s = time.monotonic() + waits.queue_timeout_s
        world_size = size.on(len(workers))
        chosen = choose(
            workers, num_workers_needed(world_size, size.ranks_per_worker), plan.resources
        )
        placement = place(chosen, world_size, size.ranks_per_worker, plan.interface)
        gang_reservation = GangReservation(client, plan, chosen, placement)
        supervision = Supervision(plan, placement, gang_reservation.links)
        try:
            if await _reserve(gang_reservation, queue_deadline_s, sink):
                sink(AttemptBegan(plan.attempt, world_size))
                return await supervision.run(sink, stop)
        finally:
            # Shielded: a caller that leaves by Ctrl-C or a timeout cancels this coroutine, and
            # the ranks must go all the same.
            await asyncio.shield(supervision.clear(sink))


async def _gather(
    client: Client, plan: GangPlan, size: GangSize, waits: Waits
) -> list[WorkerIdentity]:
    need = WorkersNeeded(
        size.workers_for_all, size.workers_for_fewest, size.ranks_per_worker, plan.resources
    )
    return await gather_workers(
        client,
        need,
        waits.workers_timeout_s,
        full_size_s=waits.full_size_s,
        warm=plan.launcher == "auto",
    )


async def _reserve(
    gang_reservation: GangReservation, deadline_s: float | None, sink: Callable[[GangEvent], None]
) -> bool:
    """Take all agents; False when the gang is to be placed anew, also since a worker left while
    it waited for it.
    """
    try:
        return await gang_reservation.take(
            deadline_s, lambda text: sink(LogLine(NO_RANK, logging.INFO, text))
        )
    except WorkerLostError as error:
        sink(LogLine(NO_RANK, logging.WARNING, f"{error}; the gang is placed anew"))
        return False
