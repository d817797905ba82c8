"""Gangs on Dask workers that are jobs of a batch system: a real Slurm, an imitated PBS."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from dask_jobqueue import PBSCluster, SLURMCluster
from distributed import Client

from prefect_torch_ddp import WorkerLostError, run_gang
from tests.integration.clusters.sites import Site
from tests.support.gangs import all_gone, by_rank, sleeping_gang
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import plain

SCHEDULER = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "allowed_failures": 0}


@contextmanager
def two_jobs(site: Site, folder: Path) -> Iterator[Client]:
    """Submit two jobs of one Dask worker each, on two nodes; give a client of theirs."""
    cluster_class = {"slurm": SLURMCluster, "pbs": PBSCluster}[site.name]
    with (
        cluster_class(
            n_workers=2,
            cores=1,
            memory="1GB",
            walltime="00:10:00",
            log_directory=str(folder),
            worker_extra_args=["--host", site.node_address],
            scheduler_options=SCHEDULER,
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=HANG_S)
        yield client


def test_a_gang_over_two_jobs(site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All is as elsewhere; a killed job ends the gang; nothing outlives its job or the cluster."""
    with two_jobs(site, tmp_path) as client:
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]
        with caplog.at_level(logging.INFO, logger="prefect_torch_ddp.ranks"):
            run_gang(client, plain.speak, args=("hello",), world_size=2)
        assert {"[rank 0] printed hello", "[rank 1] printed hello"} <= set(by_rank(caplog.messages))
        environments: list[dict[str, Any]] = run_gang(client, plain.environment, world_size=2)
        jobs = [environment[site.job_variable] for environment in environments]
        assert set(jobs) == set(site.job_ids())
        hosts = [(each["GROUP_RANK"], each["MASTER_ADDR"]) for each in environments]
        assert hosts == [("0", "127.0.0.11"), ("1", "127.0.0.11")]

        with sleeping_gang(client, tmp_path / "pids") as (gang, ranks):
            victim = jobs[1]
            assert ranks[1] in site.processes(victim)
            site.kill(victim)
            says = r"127\.0\.0\.12:\d+ was lost; it held rank 1"
            with pytest.raises(WorkerLostError, match=says):
                gang.result(HANG_S)
        wait_until(lambda: all_gone(ranks) and not site.processes(victim))
        assert run_gang(client, plain.sum_of_ones, world_size=1) == [1.0]
    wait_until(lambda: not site.job_ids() and not site.processes())
