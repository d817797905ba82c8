"""The Prefect server is restarted under a deployed run, as an operator does."""

import time
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from tests.integration.tasks.test_deployment import begin
from tests.support.mortal_server import mortal_server
from tests.support.runs import steered, train_states
from tests.support.waiting import wait_until
from tests.support.workers import prefect, worker_running

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_a_deployed_run_outlives_a_restart_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of its concurrency limit is renewed, 225 s after its start, with a server that
    was restarted since; the run completes in its first attempt."""
    monkeypatch.setenv("WHEN_BUSY", "ENQUEUE")
    with (
        mortal_server(tmp_path / "home") as server,
        worker_running(),
        get_client(sync_client=True) as client,
    ):
        prefect("deploy", "--name", "nightly", "--prefect-file", "deployments/prefect.yaml")
        run_id = begin(steered(tmp_path / "steered"))

        def state() -> str | None:
            return client.read_flow_run(run_id).state_name

        def step() -> int:
            said = tmp_path / "steered" / "step"
            return int(said.read_text()) if said.exists() else 0

        try:
            wait_until(lambda: step() > 20, 200)
            server.kill()
            server.start()
            restarted_at = time.time()

            def is_renewed() -> bool:
                leases = server.leases.glob("*-*.json")
                return any(lease.stat().st_mtime > restarted_at for lease in leases)

            wait_until(lambda: is_renewed() or state() != "Running", 300)
            assert state() == "Running"
        finally:
            (tmp_path / "steered" / "enough").touch()
        wait_until(lambda: state() == "Completed", 100)
        wait_until(lambda: train_states(run_id) == ["Completed"])
