"""Warm clusters: fork servers start with the cluster and with workers that join, and end after a
settable idle time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import Client, LocalCluster

from prefect_torch_ddp import GangError, InvalidParamsError, run_gang, warm
from tests.support.waiting import wait_until
from tests.workloads import plain

pytestmark = pytest.mark.timeout(300)
HOST_S = 90.0
"""Loading torch on a machine that has much else to do."""


@contextmanager
def cluster_of(num_workers: int, **options: Any) -> Iterator[tuple[LocalCluster, Client]]:
    """Start a cluster of its own, one thread a worker."""
    with (
        LocalCluster(
            n_workers=num_workers, threads_per_worker=1, dashboard_address=":0", **options
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(num_workers, timeout=60)
        yield cluster, client


def hosts_of(client: Client) -> list[psutil.Process]:
    """Return the fork servers below the cluster's workers that are up: they have taken their
    name."""

    def pids() -> list[int]:
        children = [
            child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
        ]
        return [child.pid for child in children if child.name() == "ddp-fork-server"]

    return [psutil.Process(pid) for found in client.run(pids).values() for pid in found]


def test_hosts_start_with_the_cluster_and_with_workers_that_join() -> None:
    """`warm` starts a host on each worker, on one that joins and on one started again; a gang
    is forked from them."""
    with cluster_of(1) as (cluster, client):
        assert run_gang(client, plain.sum_of_ones, world_size=1, launcher="exec") == [1.0]
        assert hosts_of(client) == [], "nothing is warmed for fresh processes"
        for _ in range(2):
            warm(client)
        wait_until(lambda: len(hosts_of(client)) == 1, HOST_S)
        (first,) = hosts_of(client)
        cluster.scale(2)
        wait_until(lambda: len(hosts_of(client)) == 2, HOST_S)
        assert first in hosts_of(client), "a second call does not start it anew"
        client.restart()
        wait_until(lambda: not first.is_running())
        wait_until(lambda: len(hosts_of(client)) == 2, HOST_S)
        warmed = {host.pid for host in hosts_of(client)}
        assert set(run_gang(client, os.getppid, world_size=2)) == warmed
    with pytest.raises(InvalidParamsError, match="client is closed"):
        warm(client)


def test_a_worker_without_this_package_joins_all_the_same(tmp_path: Path) -> None:
    """Warming harms nobody: such a worker starts, and a gang says what is missing."""
    without = tmp_path / "without.py"
    without.write_text("import sys\nsys.modules['prefect_torch_ddp'] = None\n")
    with cluster_of(1, preload=[str(without)]) as (cluster, client):
        warm(client)
        wait_until(lambda: "prefect-torch-ddp-warm" in client.run_on_scheduler(plugins_of_workers))
        cluster.scale(2)
        client.wait_for_workers(2, timeout=60)
        with pytest.raises(GangError, match="can't import prefect_torch_ddp"):
            run_gang(client, plain.sum_of_ones, world_size=2)


def plugins_of_workers(dask_scheduler: Any) -> list[str]:
    """Name the plugins that the scheduler hands to workers."""
    return list(dask_scheduler.worker_plugins)


def test_an_idle_host_ends_and_the_next_gang_starts_another() -> None:
    """The preload warms a worker as it starts; the idle time is Dask's configuration; a wrong
    one is no end of the world."""
    with (
        dask.config.set({"prefect-torch-ddp.fork-server.idle-s": 3}),
        cluster_of(1, preload=["prefect_torch_ddp.gang.warm"]) as (_, client),
    ):
        wait_until(lambda: len(hosts_of(client)) == 1, HOST_S)
        wait_until(lambda: hosts_of(client) == [], HOST_S)
        assert run_gang(client, plain.sum_of_ones, world_size=1) == [1.0]
        wait_until(lambda: hosts_of(client) == [], HOST_S)


@pytest.mark.parametrize("wrong", [0, -1, "soon", None])
def test_an_idle_time_that_can_not_work_is_the_default(
    wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named in the log, and hosts live as long as they would without."""
    from prefect_torch_ddp.gang.worker.fork_client import IDLE_S, idle_s

    with dask.config.set({"prefect_torch_ddp.fork_server.idle_s": wrong}):
        assert idle_s() == IDLE_S
    assert "prefect-torch-ddp.fork-server.idle-s" in caplog.text
    with dask.config.set(
        dask.config.collect_env({"DASK_PREFECT_TORCH_DDP__FORK_SERVER__IDLE_S": "7.5"})
    ):
        assert idle_s() == 7.5
