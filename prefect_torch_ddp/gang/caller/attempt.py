"""One attempt of a gang: gather workers, place, reserve, run, clear; on the client's event loop."""

import asyncio
import logging
import time
from collections.abc import Callable

from distributed import Client

from prefect_torch_ddp.errors import WorkerLostError
from prefect_torch_ddp.gang.caller.placement import GangSize, choose, num_workers_needed, place
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.gang.caller.reservation import GangReservation
from prefect_torch_ddp.gang.caller.stop import StopSwitch
from prefect_torch_ddp.gang.caller.supervisor import Supervisor
from prefect_torch_ddp.gang.caller.workers import gather_workers
from prefect_torch_ddp.protocol.events import NO_RANK, AttemptBegan, GangEvent, LogLine


async def run_attempt(
    client: Client,
    plan: GangPlan,
    size: GangSize,
    sink: Callable[[GangEvent], None],
    stop: StopSwitch,
) -> list[bytes]:
    """Return the pickled values of the ranks, in rank order."""
    options = plan.options
    queue_deadline_s: float | None = None
    while True:
        workers = await gather_workers(client, plan, size)
        if options.queue_timeout_s is not None and queue_deadline_s is None:
            queue_deadline_s = time.monotonic() + options.queue_timeout_s
        world_size = size.on(len(workers))
        num_workers = num_workers_needed(world_size, size.ranks_per_worker)
        chosen = choose(workers, num_workers, plan.resources)
        placement = place(chosen, world_size, size.ranks_per_worker, options.interface)
        reservation = GangReservation(client, plan, chosen, placement)
        supervisor = Supervisor(plan, placement, reservation.agents)
        try:
            if await _reserve(reservation, queue_deadline_s, sink):
                sink(AttemptBegan(plan.attempt, world_size))
                return await supervisor.run(sink, stop)
        finally:
            # Shielded: a caller that leaves by Ctrl-C or a timeout cancels this coroutine, and
            # the ranks must go all the same.
            await asyncio.shield(supervisor.clear(sink))


async def _reserve(
    reservation: GangReservation, deadline_s: float | None, sink: Callable[[GangEvent], None]
) -> bool:
    """Reserve all agents; False when the gang is to be placed anew."""
    try:
        return await reservation.reserve(
            deadline_s, lambda text: sink(LogLine(NO_RANK, logging.INFO, text))
        )
    except WorkerLostError as error:
        sink(LogLine(NO_RANK, logging.WARNING, f"{error}; the gang is placed anew"))
        return False
