"""One attempt of a gang: workers are gathered and reserved, ranks placed, run and supervised."""

import asyncio
import logging
import queue
import time
from collections.abc import Callable, Coroutine
from typing import Any

from distributed import Client

from prefect_torch_ddp.errors import WorkerLostError
from prefect_torch_ddp.gang.caller.growth import Growth
from prefect_torch_ddp.gang.caller.placement import (
    GangSize,
    choose,
    is_free,
    num_workers_needed,
    place_ranks,
)
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.gang.caller.reservation import GangReservation
from prefect_torch_ddp.gang.caller.stop import StopSwitch, follow
from prefect_torch_ddp.gang.caller.supervisor import Supervisor
from prefect_torch_ddp.gang.caller.wanted import WorkersWanted
from prefect_torch_ddp.gang.caller.workers import WaitingSign, gather_workers
from prefect_torch_ddp.gang.liveness import calling
from prefect_torch_ddp.gang.versions import refuse_conflicts
from prefect_torch_ddp.protocol.events import NO_RANK, AttemptBegan, GangEvent, LogLine


def run_attempt(
    client: Client, plan: GangPlan, size: GangSize, on_event: Callable[[GangEvent], None]
) -> list[bytes]:
    """Run the attempt that is planned; return the pickled values of the ranks, in rank order."""
    events: queue.SimpleQueue[GangEvent | None] = queue.SimpleQueue()
    stop = StopSwitch(plan.options.stop_grace_s)
    with calling():
        work = _run(client, plan, size, events.put, stop)
        return follow(client, work, events, on_event, stop)


async def _run(
    client: Client,
    plan: GangPlan,
    size: GangSize,
    sink: Callable[[GangEvent], None],
    stop: StopSwitch,
) -> list[bytes]:
    options, sign = plan.options, WaitingSign(sink)
    queued_s: float | None = None
    with WorkersWanted(client, plan) as wanted:
        while True:
            workers = await gather_workers(client, plan, size, sign, wanted)
            queued_s = queued_s or time.monotonic()
            num_free = sum(is_free(worker, plan.resources) for worker in workers)
            world_size = size.on(len(workers), num_free)
            num_workers = num_workers_needed(world_size, size.ranks_per_worker)
            chosen = choose(workers, num_workers, plan.resources)
            refuse_conflicts(chosen)
            placement = place_ranks(chosen, world_size, size.ranks_per_worker, options.interface)
            is_extra = size.is_growing or world_size > (size.most or world_size)
            has_extra = is_extra and num_free >= num_workers
            reservation = GangReservation(client, plan, chosen, placement, has_extra=has_extra)
            growth = Growth(client, plan, size, chosen, world_size, sink, wanted)
            supervisor = Supervisor(plan, placement, reservation.agents, growth)
            try:
                limit_s = options.queue_timeout_s
                deadline_s = None if limit_s is None else queued_s + limit_s
                reserving = reservation.reserve(queued_s, deadline_s, sign, wanted)
                if await _reserve(reserving, sink):
                    wanted.withdraw()
                    hosts = tuple(each.host for each in placement.places)
                    sink(AttemptBegan(plan.attempt, world_size, hosts))
                    return await supervisor.run(sink, stop)
            finally:
                # Shielded: a caller that leaves by Ctrl-C or a timeout cancels this coroutine, and
                # the ranks must go all the same.
                await asyncio.shield(supervisor.clear(sink))


async def _reserve(reserving: Coroutine[Any, Any, bool], sink: Callable[[GangEvent], None]) -> bool:
    """Reserve all agents; False if the gang has to be placed again."""
    try:
        return await reserving
    except WorkerLostError as error:
        sink(LogLine(NO_RANK, logging.WARNING, f"{error}; the gang is placed again"))
        return False
