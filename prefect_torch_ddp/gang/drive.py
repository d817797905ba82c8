"""Owns one attempt of a gang: gather, place, seat, run, end; on the client's event loop."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from distributed import Client

from prefect_torch_ddp.errors import WorkerLostError
from prefect_torch_ddp.gang.placement import choose, num_workers_needed, place
from prefect_torch_ddp.gang.plan import GangPlan
from prefect_torch_ddp.gang.seating import Seating
from prefect_torch_ddp.gang.supervision import Supervision
from prefect_torch_ddp.gang.workers import gather_workers
from prefect_torch_ddp.messages import NO_RANK, GangEvent, LogLine


@dataclass(frozen=True)
class Waits:
    """How long a gang waits for workers."""

    workers_timeout_s: float
    queue_timeout_s: float | None


async def drive(  # noqa: PLR0913, PLR0917 - the loop over attempts to take seats needs all of run_gang's choices
    client: Client,
    plan: GangPlan,
    world_size: int | None,
    ranks_per_worker: int,
    waits: Waits,
    sink: Callable[[GangEvent], None],
) -> list[bytes]:
    """Return the pickled values of the ranks, in rank order."""
    num_needed = None if world_size is None else num_workers_needed(world_size, ranks_per_worker)
    queue_deadline_s: float | None = None
    while True:
        workers = await gather_workers(
            client, num_needed, ranks_per_worker, waits.workers_timeout_s, plan.resources, warm=plan.launcher == "auto"
        )
        if waits.queue_timeout_s is not None and queue_deadline_s is None:
            queue_deadline_s = time.monotonic() + waits.queue_timeout_s
        chosen = choose(workers, num_needed or len(workers), plan.resources)
        size = world_size or len(chosen) * ranks_per_worker
        placement = place(chosen, size, ranks_per_worker, plan.interface)
        seating = Seating(client, plan, chosen, placement)
        supervision = Supervision(plan, placement, seating.links)
        try:
            if await _seat(seating, queue_deadline_s, sink):
                return await supervision.run(sink)
        finally:
            # Shielded: a caller that leaves by Ctrl-C or a timeout cancels this coroutine, and the ranks must go all the same.
            await asyncio.shield(supervision.clear(sink))


async def _seat(seating: Seating, deadline_s: float | None, sink: Callable[[GangEvent], None]) -> bool:
    """Take all seats; False when the gang is to be placed anew, also since a worker left while it waited for it."""
    try:
        return await seating.take(deadline_s, lambda text: sink(LogLine(NO_RANK, logging.INFO, text)))
    except WorkerLostError as error:
        sink(LogLine(NO_RANK, logging.WARNING, f"{error}; the gang is placed anew"))
        return False
