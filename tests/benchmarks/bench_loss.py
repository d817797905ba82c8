"""How soon the loss of a Dask worker or of the scheduler is reported, and how soon nothing of
the gang is left."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from distributed import Client

from prefect_torch_ddp import SchedulerLostError, WorkerLostError
from tests.benchmarks.beside import show
from tests.support.gangs import all_gone, sleeping_gang, workers_of
from tests.support.separate_cluster import SeparateCluster, separate_cluster, stop
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
ROUNDS = 5
SILENT_ROUNDS = 3


def kill_worker(cluster: SeparateCluster) -> psutil.Process:
    """SIGKILL a worker."""
    return _strike(cluster, lambda worker: worker.kill())


def stop_worker(cluster: SeparateCluster) -> psutil.Process:
    """SIGSTOP a worker."""
    return _strike(cluster, stop)


def kill_scheduler(cluster: SeparateCluster) -> psutil.Process:
    """SIGKILL the scheduler."""
    cluster.scheduler.kill()
    return cluster.scheduler


def stop_scheduler(cluster: SeparateCluster) -> psutil.Process:
    """SIGSTOP the scheduler."""
    stop(cluster.scheduler)
    return cluster.scheduler


def _strike(cluster: SeparateCluster, how: Callable[[psutil.Process], None]) -> psutil.Process:
    with Client(cluster.address) as client:
        worker = list(workers_of(client).values())[1]
    how(worker)
    return worker


def measure(
    folder: Path, hit: Callable[[SeparateCluster], psutil.Process], error: type[Exception]
) -> tuple[float, float]:
    """Return the seconds from the blow to the exception in the caller, and to the end of the
    last rank."""
    with (
        separate_cluster(folder / "cluster") as cluster,
        Client(cluster.address, timeout=2) as client,
    ):
        with sleeping_gang(client, folder / "pids") as (gang, ranks):
            began = time.monotonic()
            victim = hit(cluster)
            assert isinstance(gang.exception(60), error)
            told_s = time.monotonic() - began
            wait_until(lambda: all_gone(ranks), 30)
            gone_s = time.monotonic() - began
        if victim.is_running() and victim.status() == psutil.STATUS_STOPPED:
            victim.resume()
    return told_s, gone_s


@pytest.mark.usefixtures("short_liveness")
def test_losses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Print the table of docs/performance.md.

    Dask's own time limit for a silent worker is five minutes.
    """
    cases: tuple[
        tuple[str, Callable[[SeparateCluster], psutil.Process], type[Exception], int], ...
    ] = (
        ("a worker is killed", kill_worker, WorkerLostError, ROUNDS),
        ("the scheduler is killed", kill_scheduler, SchedulerLostError, ROUNDS),
        ("a worker is stopped", stop_worker, WorkerLostError, SILENT_ROUNDS),
        ("the scheduler is stopped", stop_scheduler, SchedulerLostError, SILENT_ROUNDS),
    )
    rows = []
    for name, hit, error, rounds in cases:
        seen = []
        for number in range(rounds):
            folder = tmp_path / f"{len(rows)}-{number}"
            folder.mkdir()
            seen.append(measure(folder, hit, error))
        told, gone = zip(*seen, strict=True)
        rows.append(
            (
                name,
                *(
                    f"{value:.2f}"
                    for value in (
                        statistics.median(told),
                        max(told),
                        statistics.median(gone),
                        max(gone),
                    )
                ),
            )
        )
    show(
        capsys,
        ("what happens", "exception: median s", "worst s", "all ranks gone: median s", "worst s"),
        rows,
    )
