"""`make nightly` deploys the examples repeatably, with a form for each that refuses wrong
options, and runs one at a time."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelled, Pending, Running

from tests.support.waiting import wait_until
from tests.support.workers import ROOT, worker_running

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("prefect_api"),
]

EXAMPLES = ("digits", "cifar10", "pet-names", "land-use", "gridded", "tabular")
CHANGING = {"updated", "created", "last_polled", "status", "resolved_at"}


def shell(command: str, log: Path, **environment: str) -> str:
    """Run a command as a person would, in the repository's root with the environment on PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with log.open("wb") as out:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env={**os.environ, "PATH": path, **environment},
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=400,
            check=False,
        )
    said = log.read_text(errors="replace")
    assert done.returncode == 0, said[-8000:]
    return said


def state_of_the_server(client: SyncPrefectClient) -> dict[str, Any]:
    """Return what `make nightly` makes there, but for the times of it."""
    pool = client.read_work_pool("train-ddp").model_dump(exclude=CHANGING)
    found: dict[str, Any] = {"pool": pool}
    for name in ("nightly", *EXAMPLES):
        deployment = client.read_deployment_by_name(f"train-ddp/{name}")
        plain = deployment.model_dump(mode="json", exclude=CHANGING)
        plain["schedules"] = [
            (each.schedule.model_dump(mode="json"), each.active) for each in deployment.schedules
        ]
        plain["concurrency_options"] = str(deployment.concurrency_options)
        del plain["version_id"], plain["version_info"]
        plain.pop("global_concurrency_limit", None)
        found[name] = plain
    return found


def refused(client: SyncPrefectClient, name: str, params: dict[str, Any]) -> str:
    """Ask for a run that the server must refuse; return what it says."""
    deployment = client.read_deployment_by_name(f"train-ddp/{name}")
    with pytest.raises(PrefectHTTPStatusError) as error:
        client.create_flow_run_from_deployment(deployment.id, parameters={"params": params})
    assert error.value.response.status_code == 409
    return str(error.value.response.json()["detail"])


def begin(client: SyncPrefectClient, name: str, tmp_path: Path) -> FlowRun:
    """Ask for a short run of the digits."""
    deployment = client.read_deployment_by_name(f"train-ddp/{name}")
    params = {"storage": str(tmp_path / "store"), "world_size": 1, "options": {"epochs": 1}}
    return client.create_flow_run_from_deployment(deployment.id, parameters={"params": params})


def test_a_night_on_one_machine(tmp_path: Path) -> None:
    """`make nightly` can be repeated, forms refuse wrong options, and runs take turns."""
    nightly = "deployments/nightly.sh --run-once"
    with get_client(sync_client=True) as client:
        said = shell(nightly, tmp_path / "first.log", WHEN_BUSY="CANCEL_NEW")
        assert "/deployments\n" in said
        assert "prefect deployment run train-ddp/nightly --watch" in said
        assert "start a worker" not in said, "it is started by the same command"
        dropping = state_of_the_server(client)
        first, second = (begin(client, "digits", tmp_path) for _ in range(2))
        client.set_flow_run_state(first.id, Pending())
        assert client.set_flow_run_state(second.id, Pending()).state.type.value == "CANCELLED"
        client.set_flow_run_state(first.id, Cancelled())

        for name in EXAMPLES:
            schema = client.read_deployment_by_name(f"train-ddp/{name}").parameter_openapi_schema
            (own,) = (each for title, each in schema["definitions"].items() if "Training" in title)
            assert all("description" in option for option in own["properties"].values()), name
            params = {"source": "/data"}
            assert "options.epochs'" in refused(client, name, {**params, "options": {"epochs": 0}})
            assert "('epoch' was" in refused(client, name, {**params, "options": {"epoch": 3}})
            wrong = {**params, "data_options": {"split_seed": "three"}}
            assert "split_seed" in refused(client, name, wrong)
        assert "'source' is a required" in refused(client, "land-use", {})

        shell(nightly, tmp_path / "second.log")
        queueing = state_of_the_server(client)
        options = {
            each: queueing[each].pop("concurrency_options") for each in ("nightly", "digits")
        }
        assert all("ENQUEUE" in option for option in options.values())
        assert all("CANCEL_NEW" in dropping[each].pop("concurrency_options") for each in options)
        for each in EXAMPLES[1:]:
            del queueing[each]["concurrency_options"], dropping[each]["concurrency_options"]
        assert queueing == dropping

        runs = [begin(client, "digits", tmp_path) for _ in range(2)]
        with worker_running():
            wait_until(
                lambda: all(client.read_flow_run(run.id).state.is_final() for run in runs),
                what="the end of both runs",
                timeout_s=400,
            )
        spans = []
        for run in runs:
            passed = client.read_flow_run_states(run.id)
            assert passed[-1].name == "Completed", passed
            began = min(state.timestamp for state in passed if state.name == Running().name)
            spans.append((began, passed[-1].timestamp))
        (_, first_ended), (second_began, _) = sorted(spans)
        assert first_ended <= second_began
        waited = [
            any(
                state.name == "AwaitingConcurrencySlot"
                for state in client.read_flow_run_states(run.id)
            )
            for run in runs
        ]
        assert any(waited)
