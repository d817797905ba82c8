"""Workers leave gracefully while a gang trains: all ranks save, and the gang moves."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster, Scheduler, Worker

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.protocol.events import FailureRecord, GangEvent
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tracking.attempt_log import RunAttemptLog
from tests.integration.gang.test_cancel import saved_steps
from tests.support.gangs import (
    RUN_WITH_CONTEXT,
    attempts_in,
    begun,
    extra_worker,
    own_cluster,
    sleeping_gang,
    workers_of,
)
from tests.support.separate_cluster import separate_cluster
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import hanging
from tests.workloads.tiny import dask_worker_of

pytestmark = pytest.mark.extended

BUSY_S = 4.0
"""Longer than ranks take to stop and save, and their worker to close."""
MANY = 8
"""Checkpoints, for which a gang has time to look for workers more than once."""


def worker_of(client: Client, rank_pid: int) -> str:
    """Return the address of the worker that a rank is on."""
    pid = dask_worker_of(rank_pid)
    (address,) = (each for each, worker in workers_of(client).items() if worker.pid == pid)
    return address


def _reach_lifetime(dask_worker: Worker) -> None:
    # What Dask's own timer does, of `dask worker --lifetime`.
    dask_worker.loop.add_callback(dask_worker.close_gracefully, reason="worker-lifetime-reached")


@contextmanager
def training(
    client: Client,
    home: Path,
    every_steps: int | None = None,
    function: Callable[..., int] = hanging.train_until_enough,
    **options: Any,
) -> Iterator["Future[list[int]]"]:
    """Train on two ranks, until told that it is enough, without any restart; give the future."""
    storage, folder = DirectoryStorage(home / "store"), home / "marks"
    folder.mkdir()
    policy = CheckpointParams(every_steps=every_steps, every_s=None, keep_last=999)

    def arguments(attempt: int) -> tuple[object, ...]:
        config = RankConfig("run", attempt, "task", storage, checkpoint=policy)
        return config, function, (str(folder),)

    log = RunAttemptLog(storage, "run", knows_steps=True)
    call = {"args": arguments, "world_size": 2, "attempt_log": log, **options}
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run_gang, client, RUN_WITH_CONTEXT, **call)


@pytest.mark.long
def test_a_worker_that_leaves_costs_no_restart(tmp_path: Path) -> None:
    """After a worker retires or reaches its lifetime, the ranks save and the gang moves."""
    events: list[GangEvent] = []
    folder, resumed_from = tmp_path / "marks", []
    with (
        own_cluster(4) as (_, client),
        training(client, tmp_path, on_event=events.append) as gang,
    ):
        for attempt, rank in ((1, 0), (2, 1)):
            pid, _ = begun(folder, attempt, rank)
            leaves = [worker_of(client, pid)]
            if attempt == 1:
                assert list(client.retire_workers(leaves)) == leaves
            else:
                client.run(_reach_lifetime, workers=leaves)
            _, first = begun(folder, attempt + 1, rank)
            resumed_from.append(first - 1)
            assert not psutil.pid_exists(pid)
        (folder / "enough").touch()
        last, _ = gang.result(HANG_S)
    assert attempts_in(events) == [(1, 2), (2, 2), (3, 2)]
    assert saved_steps(tmp_path) == [*resumed_from, last]


def _sleep_until(path: Path) -> None:
    path.with_suffix(".begun").touch()
    wait_until(path.exists)


def test_a_worker_whose_results_nobody_can_take_leaves_in_order_too(tmp_path: Path) -> None:
    """The end of all workers at once, as at a walltime, doesn't count as a failure."""
    module, end = "prefect_torch_ddp.gang.worker.leave", tmp_path / "end"
    with (
        separate_cluster(tmp_path / "cluster", 1, "--preload-nanny", module) as cluster,
        Client(cluster.address) as client,
    ):
        held = client.submit(str, 1)
        assert held.result() == "1"
        runs = client.submit(_sleep_until, end)
        wait_until(end.with_suffix(".begun").exists)
        (nanny,) = cluster.nannies
        nanny.send_signal(signal.SIGUSR1)
        wait_until(lambda: not client.scheduler_info()["workers"])

        def failures(dask_scheduler: Scheduler) -> int:
            return dask_scheduler.tasks[runs.key].suspicious

        assert client.run_on_scheduler(failures) == 0
        end.touch()
        nanny.wait(HANG_S)


SLOW_START = """
import time
from pathlib import Path
folder = Path({folder!r})
def dask_setup(worker):
    (folder / "starts").touch()
    while not (folder / "goes-on").exists():
        time.sleep(0.1)
"""


def test_a_worker_that_still_starts_leaves_as_well(tmp_path: Path) -> None:
    """A job that ends while its worker starts ends at the first signal."""
    preload = tmp_path / "slow_start.py"
    preload.write_text(SLOW_START.format(folder=str(tmp_path)), encoding="utf-8")
    options = ("--preload-nanny", "prefect_torch_ddp.gang.worker.leave", "--preload", str(preload))
    with separate_cluster(tmp_path / "cluster", 1) as cluster:
        nanny = cluster.run("worker", *options)
        wait_until((tmp_path / "starts").exists, HANG_S)
        nanny.send_signal(signal.SIGTERM)
        (tmp_path / "goes-on").touch()
        nanny.wait(HANG_S)


@pytest.mark.long
def test_a_busy_caller_hears_of_a_leave_as_well(tmp_path: Path) -> None:
    """A worker that leaves stays until its gang's caller has heard how its ranks ended."""
    events: list[GangEvent] = []
    folder, options = tmp_path / "marks", ("--preload-nanny", "prefect_torch_ddp.gang.worker.leave")
    with (
        separate_cluster(tmp_path / "cluster", 3, *options) as cluster,
        Client(cluster.address) as client,
        training(client, tmp_path, on_event=events.append) as gang,
    ):
        pid, _ = begun(folder, 1, 0)
        begun(folder, 1, 1)
        nanny = psutil.Process(dask_worker_of(pid)).parent()
        assert nanny in cluster.nannies
        client.loop.add_callback(time.sleep, BUSY_S)  # also of the gang, whose polls wait
        nanny.send_signal(signal.SIGUSR1)
        wait_until(lambda: gang.done() or any(folder.glob("2-0-from-*[0-9]")), HANG_S)
        (folder / "enough").touch()
        gang.result(HANG_S)
        _, first = begun(folder, 2, 0)
        nanny.wait(HANG_S)
    assert attempts_in(events) == [(1, 2), (2, 2)]
    assert saved_steps(tmp_path)[0] == first - 1


@pytest.mark.long
def test_a_cluster_is_scaled_down_and_up_and_down_while_a_gang_trains(tmp_path: Path) -> None:
    """The gang shrinks, grows and shrinks without a restart, also by adaptive scaling."""
    events: list[GangEvent] = []
    folder, resumed_from = tmp_path / "marks", []
    options = {"min_world_size": 1, "max_world_size": 2, "workers_timeout_s": 2.0}
    options |= {"on_event": events.append}
    with own_cluster(2) as (cluster, client), training(client, tmp_path, 25, **options) as gang:
        adapt = {"interval": "200ms", "wait_count": 1}
        scalings: list[Callable[[], object]] = [
            lambda: cluster.scale(1),
            lambda: cluster.adapt(minimum=2, maximum=2, **adapt),
            lambda: cluster.adapt(minimum=1, maximum=1, **adapt),
        ]
        begun(folder, 1, 0)
        for attempt, scale in enumerate(scalings, 2):
            scale()
            resumed_from.append(begun(folder, attempt, 0)[1] - 1)
        (folder / "enough").touch()
        (last,) = gang.result(HANG_S)
    assert attempts_in(events) == [(1, 2), (2, 1), (3, 2), (4, 1)]
    assert {*resumed_from, last} <= set(saved_steps(tmp_path))
    assert all(event.is_move for event in events if isinstance(event, FailureRecord))


@pytest.mark.long
def test_code_that_refuses_a_training_cut_short_fails_no_gang_that_grows_or_leaves(
    tmp_path: Path,
) -> None:
    """The gang grows without a restart, and a worker that leaves is named as the cause."""
    events: list[GangEvent] = []
    folder = tmp_path / "marks"
    options = {"world_size": 1, "max_world_size": 2}
    options |= {"function": hanging.train_enough, "on_event": events.append}
    with own_cluster(1) as (cluster, client), training(client, tmp_path, 25, **options) as gang:
        begun(folder, 1, 0)
        with extra_worker(cluster, 2):
            begun(folder, 2, 0)
            pid, _ = begun(folder, 2, 1)
            client.retire_workers([worker_of(client, pid)])
            begun(folder, 3, 0)
            (folder / "enough").touch()
            gang.result(HANG_S)
    assert attempts_in(events) == [(1, 1), (2, 2), (3, 1)]
    grown, left = (event for event in events if isinstance(event, FailureRecord))
    assert grown.is_move
    assert left.is_move, "all ranks saved"
    assert "workers for 2 ranks instead of 1" in grown.summary
    assert "was closed" in left.summary


def test_a_gang_does_not_grow_onto_a_busy_worker(dask_client: Client, tmp_path: Path) -> None:
    """The gang grows only after another gang has left the worker."""
    events: list[GangEvent] = []
    options = {"world_size": 1, "max_world_size": 2, "on_event": events.append}
    with (
        sleeping_gang(dask_client, tmp_path / "others", world_size=1) as (other, ranks),
        training(dask_client, tmp_path, 25, **options) as gang,
    ):
        begun(tmp_path / "marks", 1, 0)
        wait_until(lambda: len(saved_steps(tmp_path)) >= MANY)
        assert attempts_in(events) == [(1, 1)]
        ranks[0].kill()
        assert other.exception(HANG_S)
        begun(tmp_path / "marks", 2, 1)
        (tmp_path / "marks" / "enough").touch()
        gang.result(HANG_S)
    assert attempts_in(events) == [(1, 1), (2, 2)]


def test_two_gangs_that_may_grow_both_train(
    dask_cluster: LocalCluster, dask_client: Client, tmp_path: Path
) -> None:
    """Each of two gangs begins with one rank as soon as one worker is free."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    options = {"world_size": 1, "max_world_size": 2}
    with (
        Client(dask_cluster) as second,
        training(dask_client, folders[0], **options) as gang,
        training(second, folders[1], **options) as other,
        extra_worker(dask_cluster, 3),
    ):
        for folder in folders:
            begun(folder / "marks", 1, 0)
        for folder in folders:
            (folder / "marks" / "enough").touch()
        sizes = [len(each.result(HANG_S)) for each in (gang, other)]
    assert 1 in sizes
