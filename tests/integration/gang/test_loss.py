"""When the ground goes: workers, nannies, the scheduler and the caller, killed or stopped,
while a gang runs or waits on them."""

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from distributed import Client, LocalCluster

from prefect_torch_ddp import SchedulerLostError, WorkerLostError, run_gang
from tests.integration.gang.test_failures import pids_in, wait_until
from tests.support.separate_cluster import SeparateCluster, separate_cluster, stop
from tests.workloads import faulty, plain

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def others(tmp_path: Path) -> Iterator[SeparateCluster]:
    """Run a cluster of separate processes."""
    with separate_cluster(tmp_path / "cluster") as cluster:
        yield cluster


@contextlib.contextmanager
def sleeping_gang(
    client: Client, folder: Path
) -> Iterator[tuple["Future[list[object]]", list[psutil.Process]]]:
    """Run a gang of two in a thread; give its future and its ranks, once both are there."""
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(1) as pool:
        gang = pool.submit(
            run_gang, client, faulty.sleep_for_ever, args=(str(folder),), world_size=2
        )
        yield gang, [psutil.Process(pid) for pid in pids_in(folder, 2, 60)]


def workers_of(client: Client) -> dict[str, psutil.Process]:
    """Return the worker processes by address, in order."""
    return {address: psutil.Process(pid) for address, pid in sorted(client.run(os.getpid).items())}


def all_gone(processes: list[psutil.Process]) -> bool:
    """Tell whether none of them runs."""
    return not any(
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes
    )


def test_a_stopped_worker(tmp_path: Path) -> None:
    """SIGSTOP of a worker: the error names it and its silence, its ranks end by themselves, the
    others at once."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        (_, (address, worker)) = workers_of(client).items()
        try:
            with sleeping_gang(client, tmp_path) as (gang, ranks):
                stop(worker)
                error = gang.exception(60)
                assert type(error) is WorkerLostError
                assert f"worker {address} was silent for 12 s; it held rank" in str(error)
                wait_until(lambda: all_gone(ranks), 5)
        finally:
            worker.resume()
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


def test_a_killed_scheduler(others: SeparateCluster, tmp_path: Path) -> None:
    """SIGKILL of the scheduler: named at once, nothing of the gang left."""
    with (
        Client(others.address, timeout=2) as client,
        sleeping_gang(client, tmp_path / "pids") as (gang, ranks),
    ):
        others.scheduler.kill()
        assert type(gang.exception(60)) is SchedulerLostError
        wait_until(lambda: all_gone(ranks), 5)


def test_a_killed_nanny(others: SeparateCluster, tmp_path: Path) -> None:
    """SIGKILL of a nanny takes its worker along: that worker is lost, its rank and the other
    one are gone."""
    with Client(others.address) as client:
        with sleeping_gang(client, tmp_path / "pids") as (gang, ranks):
            others.nannies[0].kill()
            error = gang.exception(60)
            assert type(error) is WorkerLostError
            wait_until(lambda: all_gone(ranks), 5)
        assert run_gang(client, plain.sum_of_ones, world_size=1) == [1.0]


def test_a_stopped_nanny(others: SeparateCluster) -> None:
    """SIGSTOP of a nanny is nobody's loss: its worker works on."""
    stop(others.nannies[0])
    with Client(others.address) as client:
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


def test_a_worker_that_is_retired_under_its_rank(tmp_path: Path) -> None:
    """A worker that is retired while it holds a rank is lost, and not a cancel; the gang is
    gone."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        address = next(iter(workers_of(client)))
        with sleeping_gang(client, tmp_path) as (gang, ranks):
            client.retire_workers([address])
            error = gang.exception(60)
            assert type(error) is WorkerLostError
            assert address in str(error)
            wait_until(lambda: all_gone(ranks), 5)


def test_a_worker_that_is_retired_while_a_gang_waits_for_it(tmp_path: Path) -> None:
    """A gang waits for three workers, two of them busy; one of those leaves, another comes: the
    gang is placed anew and runs."""
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        held, release = list(workers_of(client)), tmp_path / "release"
        for address in held[:2]:
            client.submit(
                _until_there, str(release), workers=[address], pure=False, key=f"busy-{address}"
            )
        waiting = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            gang = pool.submit(
                run_gang, client, plain.sum_of_ones, world_size=3, on_event=lambda _: waiting.set()
            )
            assert waiting.wait(60), "it says for whom it waits"
            cluster.scale(4)
            client.retire_workers([held[0]])
            release.touch()
            assert gang.result(90) == [3.0, 3.0, 3.0]


def _until_there(path: str) -> None:
    wait_until(Path(path).exists, 120)
