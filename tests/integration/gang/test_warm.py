"""Warm clusters: fork servers start with workers, and end after a settable idle time."""

import os
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import Client

from prefect_torch_ddp import GangError, InvalidParamsError, run_gang, warm
from prefect_torch_ddp.gang.worker.fork_client import IDLE_S, idle_s
from tests.support.gangs import own_cluster
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import plain


def servers_of(client: Client) -> list[psutil.Process]:
    """Return the fork servers of the cluster's workers that have taken their name."""

    def pids() -> list[int]:
        children = psutil.Process().children()
        alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return [child.pid for child in alive if child.name() == "ddp-fork-server"]

    return [psutil.Process(pid) for found in client.run(pids).values() for pid in found]


def test_servers_start_with_the_cluster_and_with_workers_that_join() -> None:
    """`warm` starts one on each worker, also one that joins or restarts; gangs fork from them."""
    with own_cluster(1) as (cluster, client):
        assert run_gang(client, plain.sum_of_ones, world_size=1, launcher="exec") == [1.0]
        assert servers_of(client) == [], "nothing is warmed for fresh processes"
        for _ in range(2):
            warm(client)
        wait_until(lambda: len(servers_of(client)) == 1)
        (first,) = servers_of(client)
        cluster.scale(2)
        wait_until(lambda: len(servers_of(client)) == 2)
        assert first in servers_of(client), "a second call does not start it anew"
        client.restart()
        wait_until(lambda: not first.is_running())
        wait_until(lambda: len(servers_of(client)) == 2)
        warmed = {server.pid for server in servers_of(client)}
        assert set(run_gang(client, os.getppid, world_size=2)) == warmed
    with pytest.raises(InvalidParamsError, match="client is closed"):
        warm(client)


def test_a_worker_without_this_package_joins_all_the_same(tmp_path: Path) -> None:
    """Warming harms nobody: such a worker starts, and a gang says what is missing."""

    def plugins(dask_scheduler: Any) -> list[str]:
        return list(dask_scheduler.worker_plugins)

    without = tmp_path / "without.py"
    without.write_text("import sys\nsys.modules['prefect_torch_ddp'] = None\n")
    with own_cluster(1, preload=[str(without)]) as (cluster, client):
        warm(client)
        wait_until(lambda: "prefect-torch-ddp-warm" in client.run_on_scheduler(plugins))
        cluster.scale(2)
        client.wait_for_workers(2, timeout=HANG_S)
        with pytest.raises(GangError, match="can't import prefect_torch_ddp"):
            run_gang(client, plain.sum_of_ones, world_size=2)


def test_an_idle_server_ends_and_the_next_gang_starts_another() -> None:
    """The preload warms a worker as it starts; the idle time is Dask's configuration."""
    with (
        dask.config.set({"prefect-torch-ddp.fork-server.idle-s": 3}),
        own_cluster(1, preload=["prefect_torch_ddp.gang.warm"]) as (_, client),
    ):
        wait_until(lambda: len(servers_of(client)) == 1)
        wait_until(lambda: servers_of(client) == [])
        assert run_gang(client, plain.sum_of_ones, world_size=1) == [1.0]
        wait_until(lambda: servers_of(client) == [])


@pytest.mark.parametrize("wrong", [0, -1, "soon", None])
def test_an_idle_time_that_can_not_work_is_the_default(
    wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named in the log; a right one may come from the environment."""
    with dask.config.set({"prefect_torch_ddp.fork_server.idle_s": wrong}):
        assert idle_s() == IDLE_S
    assert "prefect-torch-ddp.fork-server.idle-s" in caplog.text
    environment = {"DASK_PREFECT_TORCH_DDP__FORK_SERVER__IDLE_S": "7.5"}
    with dask.config.set(dask.config.collect_env(environment)):
        assert idle_s() == 7.5
