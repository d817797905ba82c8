"""The workers of the cluster: which are running, who they are, and whether they are enough."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import psutil
from distributed import Client

from prefect_torch_ddp.errors import (
    GangError,
    NotEnoughWorkersError,
    SchedulerLostError,
    SchedulerUnresponsiveError,
)
from prefect_torch_ddp.gang.caller.placement import GangSize, is_free
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.gang.caller.wanted import WorkersWanted
from prefect_torch_ddp.gang.liveness import liveness_timeout_s, looked_at
from prefect_torch_ddp.gang.worker.rpc import register_rpc
from prefect_torch_ddp.protocol.events import NO_RANK, GangEvent, LogLine, Waiting
from prefect_torch_ddp.protocol.messages import WorkerIdentity
from prefect_torch_ddp.protocol.rank import Preload

POLL_S = 0.1
IMPORT_ERRORS = ("ImportError(", "ModuleNotFoundError(")
FIRST_LOOK_S = 12.0
"""How long all workers may take to answer before those that do are a gang's choice: no loss."""
SECOND_LOOK_S = 2.0
"""How long each worker may take to answer when not all of them did; all of them have had time
for their imports by then."""
LEAST_LOOK_S = 0.1
"""How long a look may take whose time is used up: what answers at once still counts."""
LATELY_S = 60.0
"""How long before the newest event of the scheduler a worker may have been retired that still
saves."""
MAX_NAMED = 4
SHOW_EVERY_S = 1.0
FIRST_LINE_S = 2.5
"""When a waiting gang says so in the log; the next lines come after 5, 10, 20, 40, ... seconds."""


def workers_away(client: Client) -> dict[str, str] | None:
    """Return an address for each other host that has workers; None: there are no workers."""
    here = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    workers = client.scheduler_info(n_workers=-1)["workers"]
    away = {worker["host"]: at for at, worker in workers.items() if worker["host"] not in here}
    return away if workers else None


class WaitingSign:
    """Says what an attempt waits for: in displays each second, in the log ever more rarely."""

    def __init__(self, sink: Callable[[GangEvent], None]) -> None:
        """Start with nothing said; the wait begins now."""
        self._sink = sink
        self._started_s = time.monotonic()
        self._next_show_s, self._next_line_s = SHOW_EVERY_S, FIRST_LINE_S

    def show(self, text: str) -> None:
        """Say it if it is due."""
        waited_s = time.monotonic() - self._started_s
        if waited_s >= self._next_show_s:
            self._next_show_s = waited_s + SHOW_EVERY_S
            self._sink(Waiting(text))
        if waited_s >= self._next_line_s:
            self._next_line_s = max(2 * self._next_line_s, waited_s)
            self._sink(LogLine(NO_RANK, logging.INFO, text))


async def gather_workers(
    client: Client, plan: GangPlan, size: GangSize, sign: WaitingSign, wanted: WorkersWanted
) -> list[WorkerIdentity]:
    """Wait until the cluster has workers for all ranks, or later for the fewest; return all.

    Autoscalers are asked for those that lack.
    Where ranks are forked, the workers' fork servers start to load torch.
    """
    timeout_s, resources = plan.options.workers_timeout_s, plan.resources
    warm = plan.preload if plan.options.launcher == "auto" else None
    having = ", ".join(f"{name}>={amount:g}" for name, amount in resources.items())
    workers = f"workers with {having}" if having else "workers"
    async with looked_at() as waiting:
        while True:
            waited_s = waiting.look()
            holds_out = waited_s < min(plan.full_size_s, timeout_s)
            num_enough = size.workers_for_all if holds_out else size.workers_for_fewest
            running = await running_workers(client)
            addresses = with_resources(running, resources)
            num_have = len(addresses)
            if num_have >= num_enough:
                answering = await identify(client, addresses, warm=warm)
                if (num_have := len(answering)) >= num_enough:
                    return answering
            if waited_s >= timeout_s:
                raise _too_few(plan, size, workers, num_have, len(running))
            await wanted.ask(num_enough - num_have)
            found = f"{num_have} of {num_enough} after {waited_s:.0f} s"
            sign.show(f"waiting for {workers}: {found} (limit {timeout_s:g} s)")
            await asyncio.sleep(POLL_S)


def _too_few(
    plan: GangPlan, size: GangSize, workers: str, num_have: int, num_running: int
) -> NotEnoughWorkersError:
    per = f" with {size.ranks_per_worker} ranks each" if size.ranks_per_worker > 1 else ""
    num_all = f"; {num_running} run in all" if num_running > num_have else ""
    return NotEnoughWorkersError(
        f"the cluster has too few {workers} after {plan.options.workers_timeout_s:g} s: "
        f"have {num_have}, need {size.workers_for_fewest}{per}{num_all}; add workers"
        f"{' with --resources' if plan.resources else ''}, lower world_size, or raise "
        "workers_timeout_s"
    )


def with_resources(
    running: Mapping[str, Mapping[str, float]], resources: Mapping[str, float]
) -> list[str]:
    """Return the addresses of the workers with these resources, held by others or not. Pure."""
    return [
        address
        for address, has in running.items()
        if all(has.get(name, 0) >= want for name, want in resources.items())
    ]


async def until_gone(
    client: Client,
    gang_name: str,
    resources: Mapping[str, float],
    limit_s: float,
    say: Callable[[str], None],
) -> None:
    """Wait while a gang of this name holds workers, retired ones too, but not beyond the limit."""
    until_s = time.monotonic() + limit_s
    left, has_said = await _lately_retired(client), False
    while time.monotonic() < until_s:
        found = await identify(client, with_resources(await running_workers(client), resources))
        leaving = await _identify_each(client, left)
        left = [worker.address for worker in leaving]
        here = [each for each in (*found, *leaving) if each.occupant == f"gang {gang_name!r}"]
        if not here:
            return
        if not has_said:
            on = ", ".join(worker.address for worker in here[:MAX_NAMED])
            say(f"an attempt still trains or stops, on {on}: waiting up to {limit_s:g} s")
            has_said = True
        await asyncio.sleep(POLL_S)


async def _lately_retired(client: Client) -> list[str]:
    """Return workers that left gracefully shortly before the newest event, and may live on."""
    assert client.scheduler is not None
    asked = client.scheduler.events(topic="all")
    events = await asyncio.wait_for(asked, liveness_timeout_s())
    newest_s = max((at for at, _ in events), default=0.0)
    return [
        event["worker"]
        for at, event in events
        if newest_s - at < LATELY_S
        and isinstance(event, dict)
        and event.get("action") == "remove-worker"
        and event.get("expected")
    ]


async def free_workers(
    client: Client, resources: Mapping[str, float], but: Collection[str] = ()
) -> list[WorkerIdentity]:
    """Return the workers whose slot, threads and resources nobody holds, but for some."""
    running = with_resources(await running_workers(client), resources)
    if not (addresses := [each for each in running if each not in but]):
        return []
    return [worker for worker in await identify(client, addresses) if is_free(worker, resources)]


async def look_for(
    client: Client, worker: WorkerIdentity, timeout_s: float
) -> Literal["answers", "silent", "gone"]:
    """Tell whether the worker is still part of the cluster, wasn't restarted, and answers.

    Raises SchedulerLostError, or SchedulerUnresponsiveError if that doesn't answer.
    """
    if worker.address not in await running_workers(client, timeout_s):
        return "gone"
    try:
        found = await asyncio.wait_for(_ask(client, [worker.address]), max(timeout_s, LEAST_LOOK_S))
    except TimeoutError:
        return "silent"
    if not found:
        return "silent"
    return "answers" if found[0].process_id == worker.process_id else "gone"


async def running_workers(
    client: Client, timeout_s: float | None = None
) -> dict[str, Mapping[str, float]]:
    """Return the running workers' resources, by address; raises as `look_for`."""
    if client.scheduler is None:
        msg = f"the scheduler was lost (the Dask client is {client.status})"
        raise SchedulerLostError(msg)
    limit_s = liveness_timeout_s()
    wait_s = limit_s if timeout_s is None else max(timeout_s, LEAST_LOOK_S)
    try:
        # Client.scheduler_info() has no workers on an asynchronous client.
        asked = client.scheduler.identity(n_workers=-1)
        info: dict[str, Any] = await asyncio.wait_for(asked, wait_s)
    except TimeoutError:
        msg = f"the scheduler {client.scheduler.address} was silent for {limit_s:g} s"
        raise SchedulerUnresponsiveError(msg) from None
    except OSError as error:
        raise _scheduler_lost(error) from error
    return {
        address: worker["resources"]
        for address, worker in info["workers"].items()
        if worker["status"] == "running"
    }


async def identify(
    client: Client, addresses: list[str], *, warm: Preload | None = None
) -> list[WorkerIdentity]:
    """Return the workers that answer; a stopped one stays in the cluster for five minutes."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(_ask(client, addresses, warm=warm), FIRST_LOOK_S)
    return await _identify_each(client, addresses, warm=warm)


async def _identify_each(
    client: Client, addresses: list[str], *, warm: Preload | None = None
) -> list[WorkerIdentity]:
    # Alone, each: to one that is gone Dask keeps connecting for 30 s.
    each = [
        asyncio.wait_for(_ask(client, [address], warm=warm), SECOND_LOOK_S) for address in addresses
    ]
    found: list[WorkerIdentity] = []
    for answer in await asyncio.gather(*each, return_exceptions=True):
        if isinstance(answer, GangError):
            raise answer
        found += [] if isinstance(answer, BaseException) else answer
    return found


async def _ask(
    client: Client, addresses: list[str], *, warm: Preload | None = None
) -> list[WorkerIdentity]:
    try:
        answers = await client.run(register_rpc, warm=warm, workers=addresses, on_error="return")
    except OSError as error:
        raise _scheduler_lost(error) from error
    for address, answer in answers.items():
        # Of an exception that doesn't come through pickle and tblib whole, such as this one,
        # Dask sends only the text.
        if isinstance(answer, ImportError) or (
            isinstance(answer, Exception) and str(answer).startswith(IMPORT_ERRORS)
        ):
            msg = (
                f"worker {address} can't import prefect_torch_ddp ({answer}): "
                f"install it there, in the same version as here"
            )
            raise GangError(msg) from answer
    # Anything else: the worker left meanwhile.
    return [answer for answer in answers.values() if isinstance(answer, WorkerIdentity)]


def _scheduler_lost(error: OSError) -> SchedulerLostError:
    return SchedulerLostError(f"the scheduler was lost ({type(error).__name__}: {error})")
