"""Warm clusters: fork servers start with workers, and end after a settable idle time."""

import os
from pathlib import Path

import psutil
import pytest
from distributed import Client

from prefect_torch_ddp import GangError, InvalidParamsError, run_gang, warm
from tests.support.gangs import all_gone, own_cluster, workers_of
from tests.support.waiting import wait_until
from tests.workloads import plain


def servers_of(client: Client) -> list[psutil.Process]:
    """Return the fork servers of the cluster's workers that have taken their name."""

    def pids() -> list[int]:
        children = psutil.Process().children(recursive=True)
        alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        return [child.pid for child in alive if child.name() == "ddp-fork-server"]

    return [psutil.Process(pid) for found in client.run(pids).values() for pid in found]


@pytest.mark.long
def test_servers_live_as_long_as_their_workers() -> None:
    """`warm` starts one fork server on each worker, which ends with its worker."""
    with own_cluster(2) as (_, client):
        assert run_gang(client, plain.sum_of_ones, world_size=1, launcher="exec") == [1.0]
        assert servers_of(client) == [], "nothing is warmed for fresh processes"
        warm(client)
        wait_until(lambda: len(servers_of(client)) == 2)
        warmed = {server.pid for server in servers_of(client)}
        warm(client)
        assert set(run_gang(client, os.getppid, world_size=2)) == warmed
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]
        servers, worker = servers_of(client), workers_of(client).popitem()[1]
        its_own = [server for server in servers if worker in server.parents()]
        assert len(its_own) == 1
        worker.kill()
        wait_until(lambda: all_gone(its_own))
    wait_until(lambda: all_gone(servers))
    with pytest.raises(InvalidParamsError, match="client is closed"):
        warm(client)


def test_workers_without_this_package_are_named(tmp_path: Path) -> None:
    """`warm` does no harm there, and a gang says what is missing."""
    without = tmp_path / "without.py"
    without.write_text("import sys\nsys.modules['prefect_torch_ddp'] = None\n")
    with own_cluster(1, preload=[str(without)]) as (_, client):
        warm(client)
        with pytest.raises(GangError, match="can't import prefect_torch_ddp"):
            run_gang(client, plain.sum_of_ones, world_size=1)


@pytest.mark.extended
def test_an_idle_server_ends_and_the_next_gang_starts_another(tmp_path: Path) -> None:
    """A server that the preload started ends when it is idle, and the next gang starts another."""
    impatient = tmp_path / "impatient.py"
    impatient.write_text(
        "from prefect_torch_ddp.gang.worker import fork_client\nfork_client.IDLE_S = 3.0\n"
    )
    preload = [str(impatient), "prefect_torch_ddp.gang.warm"]
    with own_cluster(1, preload=preload) as (_, client):
        wait_until(lambda: len(servers_of(client)) == 1)
        wait_until(lambda: servers_of(client) == [])
        assert run_gang(client, plain.sum_of_ones, world_size=1) == [1.0]
        wait_until(lambda: servers_of(client) == [])
