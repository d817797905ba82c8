"""The warm rank host: ranks are forked from one helper per Dask worker, and are all the same what a fresh process would be."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

from prefect_torch_ddp import run_gang
from tests.integration.gang.test_failures import wait_until
from tests.workloads import plain

pytestmark = pytest.mark.timeout(120)


def hosts() -> list[psutil.Process]:
    """Return the living rank hosts below this process."""
    return [process for process in psutil.Process().children(recursive=True) if process.name() == "ddp-rank-host"]


def look_around() -> dict[str, Any]:
    """Describe the rank's process."""
    import random

    import numpy as np
    import torch

    return {
        "parent": psutil.Process().parent().name(),  # type: ignore[union-attr]
        "name": psutil.Process().name(),
        "leads_session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "sockets": sum(fd.is_socket() for fd in Path("/proc/self/fd").iterdir()),
        "random": (random.random(), float(np.random.random()), int(torch.initial_seed())),  # noqa: NPY002
        "threads": torch.get_num_threads(),
        "folder": str(Path.cwd()),
        "cuda": torch.cuda.is_initialized(),
        "ddp_is_quick": "torch._dynamo" in sys.modules,
    }


def test_ranks_are_forked_and_look_fresh(dask_client: Client) -> None:
    """Own session, own random state, the worker's folder and threads, no file of the host's, CUDA untouched."""
    zero, one = run_gang(dask_client, look_around, world_size=2, process_group="none")
    folders = dask_client.run(os.getcwd)
    for rank, seen in enumerate((zero, one)):
        assert (seen["parent"], seen["name"]) == ("ddp-rank-host", f"ddp-rank-{rank}")
        assert seen["leads_session"]
        assert not seen["cuda"]
        assert seen["ddp_is_quick"], "DDP's constructor imports it, for more than a second"
        assert seen["folder"] in folders.values()
        assert seen["threads"] == 1
        assert seen["sockets"] <= (2 if rank == 0 else 1), "the events' socket, and on rank 0 the store's"
    siblings = run_gang(dask_client, look_around, world_size=4, ranks_per_worker=2, process_group="none")
    for generator in range(3):
        assert len({seen["random"][generator] for seen in (zero, one, *siblings)}) == 6


def test_exec_launcher_starts_fresh_processes(dask_client: Client) -> None:
    """`launcher="exec"` is the same contract without the host."""
    zero, one = run_gang(dask_client, look_around, world_size=2, launcher="exec")
    assert "ddp-rank-host" not in (zero["parent"], one["parent"])
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2, launcher="exec") == [2.0, 2.0]


def test_a_rank_sees_the_users_current_code(dask_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module edited between two gangs is read anew, though the host stays warm."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_between_gangs.py"
    for answer in (1, 22):
        module.write_text(f"def answer():\n    return {answer}\n")
        assert run_gang(dask_client, "edited_between_gangs:answer", world_size=1) == [answer]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_host_is_replaced(dask_client: Client, how: signal.Signals) -> None:
    """The next gang starts a new host where one died."""
    run_gang(dask_client, plain.sum_of_ones, world_size=2)
    old = hosts()
    assert old
    for host in old:
        host.send_signal(how)
    wait_until(lambda: not any(host.is_running() and host.status() != psutil.STATUS_ZOMBIE for host in old))
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


@pytest.mark.parametrize("close", [lambda cluster: None, lambda cluster: os.kill(cluster.workers[0].process.pid, signal.SIGKILL)])
def test_hosts_end_with_their_worker(close: Callable[[LocalCluster], None]) -> None:
    """A worker that closes, or is killed, takes its host along."""
    before = set(hosts())
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        run_gang(client, plain.sum_of_ones, world_size=1)
        (host,) = set(hosts()) - before
        close(cluster)
    wait_until(lambda: not host.is_running())


def test_nested_processes_die_with_their_rank(dask_client: Client, tmp_path: Path) -> None:
    """What a rank started in its session is gone when its gang is."""

    def start_and_fail(folder: str) -> None:
        import subprocess

        child = subprocess.Popen(["sleep", "600"])
        Path(folder, os.environ["RANK"]).write_text(str(child.pid))
        msg = "told to fail"
        raise ValueError(msg)

    with pytest.raises(Exception, match="told to fail"):
        run_gang(dask_client, start_and_fail, args=(str(tmp_path),), world_size=1)
    pid = int((tmp_path / "0").read_text())
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
