"""Workers, nannies and the scheduler are killed or stopped while a gang runs or waits."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import SchedulerLostError, WorkerLostError, run_gang
from prefect_torch_ddp.errors import SchedulerUnresponsiveError
from prefect_torch_ddp.gang.caller.workers import running_workers
from prefect_torch_ddp.gang.liveness import LIVENESS_TIMEOUT_S
from tests.support.gangs import all_gone, own_cluster, sleeping_gang, workers_of
from tests.support.separate_cluster import SeparateCluster, separate_cluster, stop
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import plain


@pytest.mark.extended
def test_lost_worker(tmp_path: Path) -> None:
    """A worker with a rank goes: a loss that names it, no cancel; ranks go, the next gang runs."""
    with own_cluster(2) as (_, client):
        for how in ("killed", "retired"):
            (address, worker), _ = workers_of(client).items()
            with sleeping_gang(client, tmp_path / how) as (gang, ranks):
                if how == "killed":
                    worker.kill()
                else:
                    client.retire_workers([address])
                error = gang.exception(HANG_S)
                assert type(error) is WorkerLostError
                assert address in str(error)
                wait_until(lambda ranks=ranks: all_gone(ranks))
            if how == "killed":
                assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


@pytest.mark.extended
def test_a_worker_lost_with_its_values() -> None:
    """A worker killed before its values were fetched is an error, and nothing runs twice."""
    with own_cluster(1) as (_, client):
        says = "after its ranks had returned, and their values with it"
        with pytest.raises(WorkerLostError, match=says):
            run_gang(client, plain.kill_worker_at_exit, world_size=1)
        assert run_gang(client, plain.sum_of_ones, world_size=1) == [1.0]


@pytest.mark.long
@pytest.mark.usefixtures("short_liveness")
def test_a_stopped_worker(tmp_path: Path) -> None:
    """After SIGSTOP of a worker the error names it and its silence, and all ranks end."""
    with own_cluster(2) as (_, client):
        (_, (address, worker)) = workers_of(client).items()
        try:
            with sleeping_gang(client, tmp_path) as (gang, ranks):
                stop(worker)
                error = gang.exception(HANG_S)
                assert type(error) is WorkerLostError
                assert f"worker {address} was silent for 12 s; it held rank" in str(error)
                wait_until(lambda: all_gone(ranks))
        finally:
            worker.resume()
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


@pytest.mark.extended
def test_a_lost_nanny_and_a_lost_scheduler(others: SeparateCluster, tmp_path: Path) -> None:
    """A stopped nanny is no loss; a killed nanny or scheduler is named, and the ranks end."""
    stop(others.nannies[0])
    with Client(others.address, timeout=10) as client:
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]
        others.nannies[0].resume()
        with sleeping_gang(client, tmp_path / "first") as (gang, ranks):
            others.nannies[0].kill()
            assert type(gang.exception(HANG_S)) is WorkerLostError
            wait_until(lambda: all_gone(ranks))
        with sleeping_gang(client, tmp_path / "second", world_size=1) as (gang, ranks):
            others.scheduler.kill()
            assert type(gang.exception(HANG_S)) is SchedulerLostError
            wait_until(lambda: all_gone(ranks))


@pytest.mark.extended
def test_a_worker_that_is_retired_while_a_gang_waits_for_it(tmp_path: Path) -> None:
    """A waiting gang is placed again, and runs, after a busy worker was replaced."""
    with own_cluster(3) as (cluster, client), ThreadPoolExecutor(1) as pool:
        held, release, events = list(workers_of(client)), tmp_path / "release", list[object]()
        for address in held[:2]:
            key = f"busy-{address}"
            client.submit(_until_there, str(release), workers=[address], pure=False, key=key)
        call = {"world_size": 3, "on_event": events.append}
        gang = pool.submit(run_gang, client, plain.sum_of_ones, **call)
        wait_until(lambda: events, what="that it says for whom it waits")
        cluster.scale(4)
        client.retire_workers([held[0]])
        release.touch()
        assert gang.result(HANG_S) == [3.0, 3.0, 3.0]


def _until_there(path: str) -> None:
    wait_until(Path(path).exists)


@pytest.mark.extended
def test_a_look_whose_time_is_used_up_takes_no_more(tmp_path: Path) -> None:
    """A silent scheduler is told at the caller's limit: a look began with a whole limit again."""

    async def look(client: Client) -> None:
        await asyncio.wait_for(running_workers(client, 0.0), LIVENESS_TIMEOUT_S / 2)

    with separate_cluster(tmp_path / "cluster", 1) as cluster, Client(cluster.address) as client:
        cluster.scheduler.suspend()
        try:
            with pytest.raises(SchedulerUnresponsiveError):
                client.sync(look, client)
        finally:
            cluster.scheduler.resume()
