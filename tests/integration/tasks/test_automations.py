"""The automations that report failed trainings and resume crashed runs work on a real server;
test_shell_blocks has the one that evaluates checkpoints."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest
from distributed import LocalCluster
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.events.actions import DoNothing
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.states import Crashed, Running

from prefect_torch_ddp import RankFailedError, train_flow
from prefect_torch_ddp.records.run_record import list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.tasks.test_recovery import params_of
from tests.support.waiting import HANG_S, wait_until
from tests.support.webhook import kept_posts
from tests.support.workers import ROOT

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("prefect_api"),
]


@pytest.fixture
def posted() -> Iterator[tuple[str, list[Any]]]:
    """Run a web server that keeps what is posted to it."""
    with kept_posts() as url_and_posts:
        yield url_and_posts


def test_a_failed_training_is_told_of(
    dask_cluster: LocalCluster, tmp_path: Path, posted: tuple[str, list[Any]]
) -> None:
    """A failed run is reported once, with its error and how to continue, and a successful one
    never."""
    url, kept = posted
    environment = {**os.environ, "WEBHOOK_URL": url}
    command = [sys.executable, "deployments/tell_of_failure.py"]
    for _ in range(2):  # the second replaces the first
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    too_short = [*command, "--silent-after", "9"]
    refused = subprocess.run(
        too_short, cwd=ROOT, env=environment, check=False, capture_output=True, text=True
    )
    assert "nothing was registered: --silent-after is 9" in refused.stderr
    store, address = tmp_path / "store", dask_cluster.scheduler_address
    train_flow(params_of(store, address))
    fault = {"how": "raise", "step": 7, "rank": 1, "attempts": [1, 2]}
    with pytest.raises(RankFailedError):
        train_flow(params_of(store, address, options={"fault": fault}, retries=1))
    wait_until(lambda: kept, what="a post to the webhook")
    (told,) = kept
    assert "of train-ddp/tests.workloads.tiny failed at step 7" in told["text"]
    assert "told to fail" in told["text"]
    (failed,) = (run for run in list_run_records(DirectoryStorage(store)) if run.state == "failed")
    assert told["text"].endswith(f'. To continue: resume_from="{failed.run_id}"')


@flow(name="train-ddp")
def trains(params: dict[str, Any]) -> None:
    """Have a deployment; no worker runs it here."""


def deployed(name: str) -> UUID:
    """Make a deployment of that flow, which knows its parameters."""
    made = trains.to_deployment(name).apply()
    assert isinstance(made, UUID)
    return made


FLOW_FOR_EVER = """
import sys
from pathlib import Path
from threading import Event
from uuid import UUID
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow

@flow(name="train-ddp")
def trains(params: dict) -> None:
    Path(sys.argv[2]).touch()
    Event().wait()

with get_client(sync_client=True) as client:
    run = client.read_flow_run(UUID(sys.argv[1]))
run_flow(trains, flow_run=run, parameters=run.parameters)
"""


def num_heartbeats(flow_run_id: UUID) -> int:
    """Ask Prefect's server how many a run has sent."""
    of_run = {"id": [f"prefect.flow-run.{flow_run_id}"]}
    events = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": of_run}
    with get_client(sync_client=True) as client:
        answer = client.request("POST", "/events/filter", json={"filter": events})
    return len(answer.json()["events"])


@pytest.mark.more
def test_a_run_whose_machine_is_lost_is_resumed(tmp_path: Path) -> None:
    """A killed process that nobody watches: without heartbeats its run crashes and is resumed."""
    environment = {**os.environ, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    command = [sys.executable, "deployments/resume_crashed.py", "train-ddp/lost"]

    def register(*flags: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*command, *flags],
            cwd=ROOT,
            env=environment,
            timeout=120,
            capture_output=True,
            check=False,
            text=True,
        )

    with get_client(sync_client=True) as client:
        deployment_id = deployed("lost")
        assert "give at least 60" in register("--lost-after", "59").stderr
        assert "invalid seconds value: 'nan'" in register("--lost-after", "nan").stderr
        assert "for 60 s counts as crashed" in register("--lost-after", "60").stdout
        given = {"params": {"world_size": 3}}
        lost = client.create_flow_run_from_deployment(deployment_id, parameters=given)
        begun = tmp_path / "begun"
        its_process = [sys.executable, "-c", FLOW_FOR_EVER, str(lost.id), str(begun)]
        with subprocess.Popen(its_process, env=environment) as process:
            wait_until(begun.exists)
            wait_until(lambda: num_heartbeats(lost.id))
            process.kill()

        def state_of(run: FlowRun) -> str | None:
            return client.read_flow_run(run.id).state_name

        assert state_of(lost) == "Running"
        wait_until(lambda: state_of(lost) == "Crashed", 3 * HANG_S)
        of_it = DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id]))

        def resumed() -> list[FlowRun]:
            runs = client.read_flow_runs(deployment_filter=of_it)
            return [run for run in runs if run.state is not None and run.state.is_scheduled()]

        wait_until(resumed, what="a run that the automation makes")
        assert resumed()[0].parameters["params"]["resume_from"] == f"flow-run:{lost.id}"
        name = "lost-train-ddp/lost"
        assert client.read_automations_by_name(name)
        register()
        assert not client.read_automations_by_name(name)


@pytest.mark.more
def test_a_run_that_sends_heartbeats_is_left_alone(tmp_path: Path) -> None:
    """It lives for two of the times after which a silent one counts as lost."""
    environment = {**os.environ, "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
    command = [sys.executable, "deployments/resume_crashed.py", "train-ddp/alive"]
    with get_client(sync_client=True) as client:
        deployment_id = deployed("alive")
        register = [*command, "--lost-after", "60"]
        subprocess.run(register, cwd=ROOT, env=environment, check=True, timeout=120)
        given = {"params": {"world_size": 3}}
        alive = client.create_flow_run_from_deployment(deployment_id, parameters=given)
        begun = str(tmp_path / "begun")
        its_process = [sys.executable, "-c", FLOW_FOR_EVER, str(alive.id), begun]
        with subprocess.Popen(its_process, env=environment) as process:
            wait_until(lambda: num_heartbeats(alive.id) >= 5, 3 * HANG_S)
            assert client.read_flow_run(alive.id).state_name == "Running"
            process.kill()
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)


@pytest.mark.more
def test_a_crashed_run_of_a_deployment_is_resumed() -> None:
    """The automation makes one run with the crashed one's parameters, but to resume; the third
    crash within a day pauses it until it is registered again.

    test_deployment shows a run whose process was killed.
    """
    given = {"params": {"world_size": 3, "options": {"epochs": 2}, "resume_from": None}}
    with get_client(sync_client=True) as client:
        deployment_id = deployed("crashing")
        of_it = DeploymentFilter(id=DeploymentFilterId(any_=[deployment_id]))

        def register() -> None:
            command = [sys.executable, "deployments/resume_crashed.py", "train-ddp/crashing"]
            subprocess.run(command, cwd=ROOT, check=True, timeout=120)

        def crash() -> FlowRun:
            crashed = client.create_flow_run_from_deployment(deployment_id, parameters=given)
            client.set_flow_run_state(crashed.id, Running(), force=True)
            client.set_flow_run_state(crashed.id, Crashed(message="killed"), force=True)
            return crashed

        def resumed() -> list[FlowRun]:
            runs = client.read_flow_runs(deployment_filter=of_it)
            return [run for run in runs if run.state is not None and run.state.is_scheduled()]

        def enabled() -> bool:
            name = "resume-crashed-train-ddp/crashing"
            (automation,) = client.read_automations_by_name(name)
            return automation.enabled

        for _ in range(2):  # the second replaces the first
            register()
        crashed = crash()
        wait_until(resumed, what="a run that the automation makes")
        (first,) = resumed()
        crash()
        wait_until(lambda: len(resumed()) == 2)
        assert enabled()
        crash()
        wait_until(lambda: not enabled(), what="a paused automation")
        register()
        assert enabled()
    expected = {**given["params"], "resume_from": f"flow-run:{crashed.id}"}
    assert first.parameters == {"params": expected}


@flow(name="train")
def trains_too(params: dict[str, Any]) -> None:
    """Have a name that begins another flow's."""


def test_two_deployments_have_automations_of_their_own() -> None:
    """The second one took the first one's place, as the names differed only in the slash.

    Automations of such a former name are replaced if they are this deployment's.
    """
    of_both = {"train-ddp/twin": deployed("twin")}
    of_both["train/ddp-twin"] = cast("UUID", trains_too.to_deployment("ddp-twin").apply())
    kinds = ("resume-crashed", "stop-resume-crashed", "lost")
    former = [f"{kind}-train-ddp-twin" for kind in kinds]
    with get_client(sync_client=True) as client:

        def watched_by(name: str) -> set[str]:
            found = client.read_automations_by_name(name)
            return {
                each.trigger.model_dump()["match_related"]["prefect.resource.id"] for each in found
            }

        for name, each in zip(former, [*of_both.values(), UUID(int=0)], strict=True):
            match = {"prefect.resource.id": f"prefect.deployment.{each}"}
            trigger = EventTrigger(
                match_related=match, expect={"never"}, posture=Posture.Reactive, threshold=1
            )
            client.create_automation(
                AutomationCore(name=name, trigger=trigger, actions=[DoNothing()])
            )
        for number, name in enumerate(of_both):
            command = [sys.executable, "deployments/resume_crashed.py", name, "--lost-after", "999"]
            subprocess.run(command, cwd=ROOT, check=True, timeout=120)
            assert [bool(watched_by(each)) for each in former] == [False, number == 0, True]
        for name, each in of_both.items():
            of_it = {f"prefect.deployment.{each}"}
            assert [watched_by(f"{kind}-{name}") for kind in kinds] == [of_it] * 3


@flow(name="of-a-user")
def of_a_user(params: dict[str, Any], note: str = "") -> None:
    """Have another parameter."""


@flow(name="without-parameters")
def without_parameters() -> None:
    """Have none."""


@pytest.mark.parametrize(
    ("has", "named"), [(of_a_user, "params, note"), (without_parameters, "none")]
)
def test_a_flow_whose_parameters_would_be_lost_is_refused(has: Any, named: str) -> None:
    """The new run would have a default in place of what the crashed one was given."""
    at = f"{has.name}/nightly"
    has.to_deployment("nightly").apply()
    command = [sys.executable, "deployments/resume_crashed.py", at]
    done = subprocess.run(
        command, cwd=ROOT, timeout=120, capture_output=True, check=False, text=True
    )
    assert (
        f"nothing was registered: the flow of {at} has the parameters {named}, and" in done.stderr
    )
    with get_client(sync_client=True) as client:
        assert not client.read_automations_by_name(f"resume-crashed-{at}")
