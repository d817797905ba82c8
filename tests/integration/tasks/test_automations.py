"""The automations that are shipped, against a real server: a committed checkpoint is evaluated,
and a training that failed is told of."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun

from prefect_torch_ddp import RankFailedError, train_flow
from tests.integration.tasks.test_recovery import params_of
from tests.support.waiting import wait_until
from tests.support.workers import ROOT, prefect, worker_running

pytestmark = [
    pytest.mark.extended,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("prefect_api"),
]


@pytest.fixture
def posted() -> Iterator[tuple[str, list[Any]]]:
    """Run a web server that keeps what is posted to it."""
    kept: list[Any] = []

    class Keeper(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Keeper)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", kept
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def worker(prefect_api: str) -> Iterator[None]:
    """Deploy deployments/on_checkpoint.yaml as documented, and run a worker."""
    with worker_running():
        prefect("deploy", "--all", "--prefect-file", "deployments/on_checkpoint.yaml")
        yield
        prefect("deployment", "delete", "evaluate-checkpoint/on-checkpoint")


def evaluations() -> list[FlowRun]:
    """Return the flow runs that the automation made."""
    tags = FlowRunFilterTags(all_=["train-ddp"])
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=tags))
    return [run for run in found if "checkpoint" in run.parameters]


@pytest.mark.usefixtures("worker")
def test_a_committed_checkpoint_is_evaluated(dask_cluster: LocalCluster, tmp_path: Path) -> None:
    """By the run's own workload, parameters and data, from its record alone."""
    store = tmp_path / "checkpoints" / "store"
    report = train_flow(params_of(store, dask_cluster.scheduler_address))

    def states() -> set[str | None]:
        return {run.state_name for run in evaluations()}

    # While one runs, others are passed over.
    ended = ({"Completed"}, {"Completed", "Cancelled"})
    wait_until(lambda: states() in ended, what="the end of all evaluations", timeout_s=300)
    uris = {run.parameters["checkpoint"] for run in evaluations()}
    assert uris == {f"{store}/runs/{report.run_id}"}


def test_a_failed_training_is_told_of(
    dask_cluster: LocalCluster, tmp_path: Path, posted: tuple[str, list[Any]]
) -> None:
    """Once, with the run and its error, however often it was tried; nothing of one that went
    well."""
    url, kept = posted
    environment = {**os.environ, "WEBHOOK_URL": url}
    command = [sys.executable, "deployments/tell_of_failure.py"]
    for _ in range(2):  # the second replaces the first
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    store, address = tmp_path / "store", dask_cluster.scheduler_address
    train_flow(params_of(store, address))
    fault = {"how": "raise", "step": 7, "rank": 1, "attempts": [1, 2]}
    with pytest.raises(RankFailedError):
        train_flow(params_of(store, address, options={"fault": fault}, retries=1))
    wait_until(lambda: kept, what="a post to the webhook")
    (told,) = kept
    assert "of train-ddp/tests.workloads.tiny failed at step 7" in told["text"]
    assert "told to fail" in told["text"]
