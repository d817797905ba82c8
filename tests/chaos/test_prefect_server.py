"""The Prefect server dies while ranks train, and comes back."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client

from prefect_torch_ddp import TrainParams, train_flow
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.tasks.test_cancel import (
    flow_process,
    newest_run,
    params_of,
    ranks_of,
    steps_saved,
    wait_for_checkpoint,
    wait_until_gone,
)
from tests.support.mortal_server import Server, mortal_server
from tests.support.runs import flow_run_id_of, train_states
from tests.support.waiting import HANG_S, wait_until

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Run a server that may be killed; flows of this test talk to it."""
    with mortal_server(tmp_path / "home") as server:
        yield server


def test_a_server_that_is_killed_and_comes_back(server: Server, tmp_path: Path) -> None:
    """Ranks continue without the server, and the run ends Completed after its return."""
    params = TrainParams(
        workload="tests.workloads.tiny:Steered",
        storage=str(tmp_path / "store"),
        world_size=2,
        options={"folder": str(tmp_path)},
        retries=0,
    )
    with ThreadPoolExecutor(1) as pool:
        steered = pool.submit(_strike, server, tmp_path)
        report = train_flow(params)
        assert steered.result() >= 500
    assert report.training.attempt == 1
    run_id = flow_run_id_of(report.flow_run_url)
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run_id).state_name == "Completed"
    wait_until(lambda: train_states(run_id) == ["Completed"])


def test_ctrl_c_while_the_server_is_away(server: Server, tmp_path: Path) -> None:
    """The ranks save, and the run is Cancelled, however long the server is away.

    What Prefect's client raised after a minute hid the cancel: the flow had failed.
    """

    def said() -> str:
        return (tmp_path / "said").read_text(encoding="utf-8")

    with flow_process(tmp_path, params_of(tmp_path, retries=2).model_dump_json()) as process:
        ranks = ranks_of(tmp_path)
        wait_for_checkpoint(tmp_path)
        _, run_id = newest_run()
        server.kill()
        process.send_signal(signal.SIGINT)
        wait_until_gone(ranks)
        wait_until(lambda: "Prefect could not be told that the flow of task run" in said())
        server.start()
        assert process.wait(HANG_S) != 0
    assert "CancelledRun: cancelled by Ctrl-C (SIGINT): Prefect did not say how its task" in said()
    (record,) = list_run_records(DirectoryStorage(tmp_path / "store"))
    assert (record.state, len(record.attempts)) == ("cancelled", 1)
    assert f"all ranks stop after step {steps_saved(tmp_path, run_id)[-1]}\n" in said()


def test_a_lease_survives_a_restart_of_the_server(server: Server) -> None:
    """A restarted server knows the lease of a deployment's concurrency limit."""
    with get_client(sync_client=True) as client:
        limit = {"name": "one-at-a-time", "limit": 1, "active": True}
        client.request("POST", "/v2/concurrency_limits/", json=limit)
        begun = client.increment_concurrency_slots_with_lease(
            ["one-at-a-time"], 1, "concurrency", 60
        )
        lease = begun.json()["lease_id"]
        server.kill()
        server.start()
        client.renew_concurrency_lease(lease, 60)


def _strike(server: Server, folder: Path) -> int:
    """Kill the server in the middle of the training, start it when ranks have continued
    without it; return how many steps they made."""
    try:
        wait_until(lambda: _step(folder) > 20, 200)
        server.kill()
        at_death = _step(folder)
        wait_until(lambda: _step(folder) > at_death + 500, 200)
        server.start()
        return _step(folder) - at_death
    finally:
        (folder / "enough").touch()


def _step(folder: Path) -> int:
    return int((folder / "step").read_text()) if (folder / "step").exists() else 0
