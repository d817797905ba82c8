"""A12: gangs and train_flow on clusters that others started, and on a cluster class with its
arguments."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from distributed import Client, LocalCluster
from prefect.client.orchestration import get_client

from prefect_torch_ddp import (
    ClusterParams,
    InvalidParamsError,
    TrainParams,
    TrainReport,
    run_gang,
    train_flow,
)
from tests.support.runs import flow_run_id_of, task_runs_of, wait_until_said
from tests.support.waiting import wait_until
from tests.workloads import plain

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("prefect_api")]

READY_S = 60.0
STOP_S = 10.0


@pytest.fixture
def scheduler_address(tmp_path: Path) -> Iterator[str]:
    """Start `dask scheduler` and two `dask worker` with their nannies, as an operator would;
    give the scheduler's address."""
    scheduler_file = tmp_path / "scheduler.json"
    with started(tmp_path, "scheduler", "--port", "0", "--dashboard-address", "127.0.0.1:0"):
        wait_until(scheduler_file.exists)
        names = ("first", "second")
        command = ("--nthreads", "1", "--dashboard-address", "127.0.0.1:0", "--name")
        with (
            started(tmp_path, "worker", *command, names[0]),
            started(tmp_path, "worker", *command, names[1]),
        ):
            with Client(scheduler_file=str(scheduler_file)) as client:
                client.wait_for_workers(2, timeout=READY_S)
                address = client.scheduler.address
            yield address


@contextmanager
def started(folder: Path, what: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Dask command away from the repository; at the end stop it and all it started."""
    command = [
        sys.executable,
        "-m",
        "dask",
        what,
        "--scheduler-file",
        str(folder / "scheduler.json"),
        "--host",
        "127.0.0.1",
    ]
    work = folder / f"{what}-{'-'.join(options[-1:])}".replace(":", "-")
    work.mkdir()
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *options], cwd=work, stdout=log, stderr=log, env=dict(os.environ)
        )
        try:
            yield process
        finally:
            family = [
                psutil.Process(process.pid),
                *psutil.Process(process.pid).children(recursive=True),
            ]
            process.terminate()
            _, left = psutil.wait_procs(family, timeout=STOP_S)
            for member in left:
                member.kill()
            process.wait()


def check(report: TrainReport) -> None:
    """Expect a whole run: trained, evaluated, all four tasks and the run itself Completed, both
    ranks heard."""
    assert (
        report.training.world_size,
        report.training.num_epochs,
        report.evaluation.num_samples,
    ) == (2, 3, 21)
    assert Path(report.model_uri).exists()
    flow_run_id = flow_run_id_of(report.flow_run_url)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(flow_run_id).state_name == "Completed"
    runs = task_runs_of(flow_run_id)
    assert runs.keys() == {"prepare", "train", "evaluate", "publish"}
    assert {run.state_name for run in runs.values()} <= {"Completed", "Cached"}
    for rank in (0, 1):
        wait_until_said(flow_run_id, f"[rank {rank}] step 1")


def test_scheduler_and_workers_of_others(scheduler_address: str, tmp_path: Path) -> None:
    """By address, twice in a row: both runs complete, the second has nothing to prepare, and
    the cluster is still there."""
    cluster = ClusterParams(address=scheduler_address)
    params = TrainParams(
        workload="tests.workloads.tiny", storage=str(tmp_path / "store"), cluster=cluster
    )
    with Client(scheduler_address) as client:
        before = sorted(client.scheduler_info(n_workers=-1)["workers"])
    first, second = train_flow(params), train_flow(params)
    check(first)
    check(second)
    states = [
        task_runs_of(flow_run_id_of(report.flow_run_url))["prepare"].state_name
        for report in (first, second)
    ]
    assert states == ["Completed", "Cached"]
    assert first.evaluation == second.evaluation
    with Client(scheduler_address) as client:
        assert sorted(client.scheduler_info(n_workers=-1)["workers"]) == before
        assert not client.processing()[before[0]]


def test_a_gang_on_scheduler_and_workers_of_others(scheduler_address: str) -> None:
    """Without Prefect, twice: the functions are imported in the ranks though the workers run in
    folders of their own."""
    with Client(scheduler_address) as client:
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]
        assert run_gang(client, "tests.workloads.plain:sum_of_ones", world_size=2) == [2.0, 2.0]


def test_cluster_class_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class by its import path, made for the run with the arguments given and gone after
    it."""
    import dask

    kwargs = {
        "n_workers": 2,
        "threads_per_worker": 1,
        "dashboard_address": "127.0.0.1:0",
        "name": "mine",
        "security": True,  # TLS, by certificates of its own
    }
    cluster = ClusterParams(cluster_class="distributed.LocalCluster", cluster_kwargs=kwargs)
    # Else Dask leaves the workers' OMP_NUM_THREADS and more in this process.
    with dask.config.set({"distributed.nanny.pre-spawn-environ": {}}):
        report = train_flow(
            TrainParams(
                workload="tests.workloads.tiny", storage=str(tmp_path / "store"), cluster=cluster
            )
        )
    check(report)


def test_a_folder_that_a_workers_host_does_not_share(tmp_path: Path) -> None:
    """The flow looks before anything is prepared: what it writes there isn't seen on the host of a
    worker, which has another folder mounted under that path."""
    storage = tmp_path / "store"
    storage.mkdir()
    mount = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{storage}" && exec "$@"']
    if subprocess.run([*mount, "sh", "true"], check=False, capture_output=True).returncode:
        pytest.skip("mount namespaces need root")
    command = ["worker", "--no-nanny", "--no-dashboard", "--host", "127.0.0.2"]
    with LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster:
        address = cluster.scheduler_address
        worker = subprocess.Popen(
            [*mount, "sh", sys.executable, "-m", "dask", *command, address], cwd=tmp_path
        )
        try:
            with Client(cluster) as client:
                client.wait_for_workers(1, timeout=READY_S)
            params = TrainParams(
                workload="tests.workloads.tiny",
                storage=str(storage),
                cluster=ClusterParams(address=address),
            )
            says = rf"the hosts don't share the storage .*{storage}: 127\.0\.0\.2 don't see there"
            with pytest.raises(InvalidParamsError, match=says):
                train_flow(params)
        finally:
            worker.kill()
            worker.wait()
    assert not any(storage.glob("**/*.json"))
