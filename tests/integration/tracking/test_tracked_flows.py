"""A flow's own process keeps MLflow up to date with its runs, and ends with the flow."""

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from prefect_torch_ddp import list_runs, read_metrics
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.tracking.test_mlflow import SERIES
from tests.support.mlflow_server import ROOT, MlflowServer, mlflow_in
from tests.support.ports import free_port
from tests.support.waiting import HANG_S, wait_until

# The environment of the server is installed once for a checkout.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

FLOWS = "tests.workloads.fed_flows"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    """Run MLflow's server."""
    with mlflow_in(tmp_path_factory.mktemp("mlflow")) as found:
        yield found


@contextmanager
def flow_of(
    server: MlflowServer, api: str, folder: Path, kind: str, **variables: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a flow with a store in a folder; what it says is in the file `said`."""
    name = folder.name
    environment = {
        **server.environment,
        "PREFECT_API_URL": api,
        "PREFECT_LOGGING_LEVEL": "INFO",
        "MLFLOW_EXPERIMENT_NAME": name,
        **variables,
    }
    command = [str(server.python), "-m", FLOWS, kind, str(folder / "store"), "mlflow"]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def said(folder: Path) -> str:
    """Return what the flow has printed, in one line."""
    return " ".join((folder / "said").read_text(errors="replace").split())


def runs_in(server: MlflowServer, folder: Path) -> dict[str, list]:
    """Return MLflow's runs of a test: status, series, parameters and tags, by our names."""
    _, found = json.loads(server.run("-c", SERIES, folder.name))
    return {name: [status, series, *rest] for name, status, series, *rest in found}


def expected(folder: Path, run_id: str) -> dict[str, list[list[float]]]:
    """Return the series that count."""
    rows = read_metrics(folder / "store", run_id, by="step")
    before = ["step", "epoch", "attempt", "time", "num_samples"]
    return {
        name: rows[["step", name]].dropna().to_numpy().tolist()
        for name in rows.columns.drop(before)
    }


def feeds_of(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """Return the processes next to a flow that feed trackers."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [
        each for each in children if "prefect_torch_ddp.tracking.trackers.feed" in each.cmdline()
    ]


def only_run(folder: Path) -> str:
    """Return the only run's id."""
    (run,) = list_runs(folder / "store").itertuples()
    return str(run.run_id)


def test_a_run_of_train_flow_is_in_mlflow_when_the_flow_ends(
    server: MlflowServer, prefect_api: str, tmp_path: Path
) -> None:
    """With the steps that count, though a rank was killed, and with the evaluation."""
    with flow_of(server, prefect_api, tmp_path, "train") as process:
        assert process.wait(4 * HANG_S) == 0, said(tmp_path)
    run_id = only_run(tmp_path)
    status, series, params, _ = runs_in(server, tmp_path)[run_id]
    evaluated = [name for name in series if name.startswith("evaluation/")]
    assert "evaluation/accuracy" in evaluated
    assert {name: series[name] for name in series.keys() - set(evaluated)} == expected(
        tmp_path, run_id
    )
    assert len(list_runs(tmp_path / "store")) == 1
    assert (status, params["workload"]) == ("FINISHED", "tests.workloads.tiny")
    assert f"run {run_id} in mlflow: {server.url}" in said(tmp_path)


@pytest.mark.more
def test_runs_of_tasks_are_in_mlflow_when_their_flow_fails(
    server: MlflowServer, prefect_api: str, tmp_path: Path
) -> None:
    """One that was submitted and has completed, one that was called and failed for good: it has
    the steps before its newest checkpoint."""
    with flow_of(server, prefect_api, tmp_path, "failing-task") as process:
        assert process.wait(4 * HANG_S) == 1, said(tmp_path)
    found = runs_in(server, tmp_path)
    by_state = {run.state: run.run_id for run in list_runs(tmp_path / "store").itertuples()}
    assert found.keys() == set(by_state.values())
    status, series, *_ = found[by_state["completed"]]
    assert (status, series) == ("FINISHED", expected(tmp_path, by_state["completed"]))
    failed = by_state["failed"]
    status, series, *_ = found[failed]
    newest = max(each.step for each in list_manifests(DirectoryStorage(tmp_path / "store"), failed))
    wanted = {
        name: [point for point in points if point[0] < newest]
        for name, points in expected(tmp_path, failed).items()
    }
    assert (status, series) == ("FAILED", wanted)
    assert len(series["loss"]) == newest - 1


@pytest.mark.more
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_process_ends_with_a_flow_that_is_stopped(
    server: MlflowServer, prefect_api: str, tmp_path: Path, number: signal.Signals
) -> None:
    """Cancelled, it has one more sync; killed, it ends at once, and the command sends the rest."""
    with flow_of(server, prefect_api, tmp_path, "steered") as process:
        wait_until((tmp_path / "step").exists, 4 * HANG_S, said(tmp_path))
        (feed,) = feeds_of(process)
        wait_until(lambda: is_known(server, tmp_path), 4 * HANG_S, "MLflow's experiment")
        wait_until(lambda: int((tmp_path / "step").read_text()) > 60)
        os.kill(process.pid, number)
        process.wait(HANG_S)
        wait_until(lambda: not feed.is_running() or feed.status() == psutil.STATUS_ZOMBIE)
    run_id = only_run(tmp_path)
    wait_until(lambda: not any(map(psutil.pid_exists, ranks_of(tmp_path))))
    # On a machine that is loaded, a cancelled flow may not wait for the last sync.
    if number == signal.SIGKILL or "`prefect-torch-ddp sync" in said(tmp_path):
        sync = ["-m", "prefect_torch_ddp", "sync", run_id, "--tracker", "mlflow", "--storage"]
        own = {**server.environment, "MLFLOW_EXPERIMENT_NAME": tmp_path.name}
        MlflowServer(server.url, server.python, own).run(*sync, str(tmp_path / "store"))
    status, series, *_ = runs_in(server, tmp_path)[run_id]
    storage = DirectoryStorage(tmp_path / "store")
    newest = max(each.step for each in list_manifests(storage, run_id))
    points = expected(tmp_path, run_id)["loss"]
    assert series["loss"] == [point for point in points if point[0] < newest]
    # A killed flow's failure is on record if the dying cluster's workers heard of it in time.
    (state,) = list_runs(tmp_path / "store")["state"]
    assert status == {"training": "RUNNING", "failed": "FAILED", "cancelled": "KILLED"}[state]
    assert (state == "cancelled") == (number == signal.SIGINT)


def is_known(server: MlflowServer, folder: Path) -> bool:
    """Tell whether MLflow has the experiment of a test."""
    name = f"experiment_name={folder.name}"
    try:
        urllib.request.urlopen(f"{server.url}/api/2.0/mlflow/experiments/get-by-name?{name}")
    except urllib.error.HTTPError:
        return False
    return True


def ranks_of(folder: Path) -> list[int]:
    """Return the pids of the two ranks."""
    return [int((folder / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize("is_silent", [pytest.param(False, marks=pytest.mark.more), True])
def test_a_flow_ends_though_the_tracker_is_away(
    server: MlflowServer, prefect_api: str, tmp_path: Path, *, is_silent: bool
) -> None:
    """Nobody listens, or somebody who never answers: a warning names the command that sends
    everything later."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1] if is_silent else free_port()
        url = f"http://127.0.0.1:{port}"
        with flow_of(server, prefect_api, tmp_path, "train", MLFLOW_TRACKING_URI=url) as process:
            assert process.wait(4 * HANG_S) == 0, said(tmp_path)
    run_id = only_run(tmp_path)
    why = "its last sync took over 10 s" if is_silent else f"MLflow at {url} failed"
    assert f"mlflow doesn't have all of run {run_id}: {why}" in said(tmp_path)
    sync = f"sync {run_id} --tracker mlflow --storage {tmp_path / 'store'}"
    assert f"`prefect-torch-ddp {sync}` brings it up to date" in said(tmp_path)
    own = {**server.environment, "MLFLOW_EXPERIMENT_NAME": tmp_path.name}
    MlflowServer(server.url, server.python, own).run("-m", "prefect_torch_ddp", *sync.split())
    status, series, *_ = runs_in(server, tmp_path)[run_id]
    assert status == "FINISHED"
    assert series["loss"] == expected(tmp_path, run_id)["loss"]
