"""The automation that reports failed trainings runs on a real server; test_shell_blocks has
the one that evaluates checkpoints."""

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

from prefect_torch_ddp import RankFailedError, train_flow
from tests.integration.tasks.test_recovery import params_of
from tests.support.waiting import wait_until
from tests.support.workers import ROOT

pytestmark = [
    pytest.mark.extended,
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


def test_a_failed_training_is_told_of(
    dask_cluster: LocalCluster, tmp_path: Path, posted: tuple[str, list[Any]]
) -> None:
    """A failed run is reported once, with its error, and a successful one never."""
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
