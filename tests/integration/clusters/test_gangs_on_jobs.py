"""A12: gangs on Dask workers that are jobs of a batch system: a real Slurm, an imitated PBS."""

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from dask_jobqueue import PBSCluster, SLURMCluster
from distributed import Client

from prefect_torch_ddp import WorkerLostError, run_gang
from tests.integration.clusters.pbs import PbsSite
from tests.integration.clusters.slurm import SlurmSite
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import failing, plain


@contextmanager
def two_jobs(site: SlurmSite | PbsSite, folder: Path) -> Iterator[Client]:
    """Submit two jobs of one Dask worker each, on two nodes; give a client of theirs."""
    cluster_class = {"slurm": SLURMCluster, "pbs": PBSCluster}[site.name]
    # Each job has a temporary folder of its own, as many sites arrange it.
    scratch = f"{folder}/scratch-${{{site.job_variable}}}"
    with (
        cluster_class(
            n_workers=2,
            cores=1,
            memory="1GB",
            walltime="00:10:00",
            log_directory=str(folder),
            job_script_prologue=[f'export TMPDIR="{scratch}"', 'mkdir -p "$TMPDIR"'],
            worker_extra_args=["--host", site.node_address],
            scheduler_options={
                "host": "127.0.0.1",
                "dashboard_address": "127.0.0.1:0",
                "allowed_failures": 0,
            },
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=HANG_S)
        yield client


def check_places(
    site: SlurmSite | PbsSite, folder: Path, environments: list[dict[str, str]]
) -> None:
    """Expect torchrun's contract for two ranks on two nodes, and each job's own settings."""
    of_nodes = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": "2",
    }
    for rank, environment in enumerate(environments):
        expected = of_nodes | {
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.11",
        }
        expected |= {
            "TMPDIR": f"{folder}/scratch-{environment[site.job_variable]}",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        assert {name: environment[name] for name in expected} == expected
    assert {environment[site.job_variable] for environment in environments} == set(site.job_ids())


def pids_in(folder: Path) -> list[int]:
    """Wait until both ranks have written their pids and return them."""
    paths = [folder / "0", folder / "1"]
    wait_until(lambda: all(path.exists() for path in paths))
    return [int(path.read_text()) for path in paths]


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended; one that nobody has reaped yet has."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_a_gang_over_two_jobs(
    site: SlurmSite | PbsSite, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All is as elsewhere; a killed job ends the gang; nothing outlives its job or the cluster."""
    pid_folder = tmp_path / "pids"
    pid_folder.mkdir()
    with two_jobs(site, tmp_path) as client, ThreadPoolExecutor(1) as pool:
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]
        with caplog.at_level(logging.INFO, logger="prefect_torch_ddp.ranks"):
            run_gang(client, plain.speak, args=("hello",), world_size=2)
        assert {"[rank 0] printed hello", "[rank 1] printed hello"} <= set(caplog.messages)
        environments: list[dict[str, Any]] = run_gang(client, plain.environment, world_size=2)
        check_places(site, tmp_path, environments)

        training = pool.submit(
            run_gang, client, failing.sleep_for_ever, args=(str(pid_folder),), world_size=2
        )
        pids = pids_in(pid_folder)
        victim = environments[1][site.job_variable]
        assert pids[1] in {process.pid for process in site.processes(victim)}
        site.kill(victim)
        with pytest.raises(WorkerLostError, match=r"127\.0\.0\.12:\d+ was lost; it held rank 1"):
            training.result(HANG_S)
        wait_until(lambda: all(map(is_gone, pids)) and not site.processes(victim))
        assert run_gang(client, plain.sum_of_ones, world_size=1) == [1.0]
    wait_until(lambda: not site.job_ids() and not site.processes())
