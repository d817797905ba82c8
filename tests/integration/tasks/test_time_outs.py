"""A wait that times out as a task ends, on a client whose event loop is slow."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

import pytest
from distributed import Client, LocalCluster
from prefect_dask.task_runners import PrefectDaskFuture

from prefect_torch_ddp.gang.caller.agent_client import AgentClient
from prefect_torch_ddp.protocol.messages import WorkerIdentity
from prefect_torch_ddp.tasks.watch.watched_task import WatchedFuture

pytestmark = [pytest.mark.timeout(120), pytest.mark.extended]


@contextmanager
def slow_loop(client: Client, turn_s: float) -> Iterator[None]:
    """Let each turn of the client's event loop take so long."""
    loop, left = client.loop.asyncio_loop, False

    def turn() -> None:
        time.sleep(turn_s)
        if not left:
            loop.call_soon(turn)

    loop.call_soon_threadsafe(turn)
    try:
        yield
    finally:
        left = True


def ended_after(number: int) -> int:
    """Return the number after a tenth of a second."""
    time.sleep(0.1)
    return number


def test_a_wait_that_times_out_as_its_task_ends_leaves_the_result(
    dask_cluster: LocalCluster,
) -> None:
    """A time-out between a task's end and the fetch of its result made each later fetch fail."""
    with Client(dask_cluster) as client, slow_loop(client, 0.01):
        for number in range(5):
            made = client.submit(ended_after, number, pure=False)
            future = WatchedFuture(PrefectDaskFuture(uuid4(), made), client)
            future.wait_for(lambda: 0.03)  # in turns of this length
            assert future.result() == number


def test_a_growth_that_waits_no_longer_for_its_old_agents_leaves_other_results(
    dask_cluster: LocalCluster,
) -> None:
    """It gives them some seconds; a fetch of their values that it gave up made later ones fail."""

    async def grow() -> None:
        async with Client(dask_cluster.scheduler_address, asynchronous=True) as client:
            [address] = list((await client.scheduler.identity())["workers"])[:1]
            worker = WorkerIdentity(address, "its process", "its host", None, None)
            with slow_loop(client, 0.01):
                for number in range(20):
                    made = client.submit(ended_after, number, pure=False)
                    wait_s = 0.011 + number % 5 / 1000
                    agent = AgentClient(client, worker, "token", made)
                    while made.status == "pending":
                        with suppress(TimeoutError):
                            await asyncio.wait_for(agent.ended(), wait_s)
                    assert await made.result() == number

    asyncio.run(grow())
