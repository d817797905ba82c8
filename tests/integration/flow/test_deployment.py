"""E2: a real server, a process work pool and a worker; `prefect deployment run train-ddp/nightly --watch` ends Completed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName, FlowRunFilter, FlowRunFilterState
from prefect.client.schemas.filters import FlowRunFilterStateType as StateTypeFilter
from prefect.client.schemas.objects import StateType

from tests.integration.gang.test_failures import pids_in, wait_until
from tests.integration.runs import artifacts_of

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]
PREFECT = [sys.executable, "-m", "prefect", "--no-prompt"]


def prefect(*command: str, timeout_s: float = 120) -> str:
    """Run a Prefect command in the repository's root, as a person would, and return what it printed."""
    done = subprocess.run([*PREFECT, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def deployed(prefect_api: str, tmp_path: Path) -> Iterator[str]:
    """Create the work pool, deploy deployments/prefect.yaml and run a worker; gives the API URL."""
    prefect("work-pool", "create", "train-ddp", "--type", "process", "--overwrite")
    prefect("deploy", "--all", "--prefect-file", "deployments/prefect.yaml")
    with (tmp_path / "worker.log").open("wb") as log:
        command = [*PREFECT, "worker", "start", "--pool", "train-ddp", "--type", "process"]
        worker = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=dict(os.environ))
        try:
            yield prefect_api
        finally:
            worker.terminate()
            try:
                worker.wait(20)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def test_nightly_runs_to_completed(deployed: str, tmp_path: Path) -> None:
    """Deploy as documented, run the deployment by its name, and find its artifacts; the cron has scheduled runs."""
    params = {"workload": "flows.digits", "storage": str(tmp_path / "store"), "options": {"epochs": 2}}
    printed = prefect(
        "deployment", "run", "train-ddp/nightly", "--watch", "--param", f"params={json.dumps(params)}", timeout_s=240
    )
    assert "Completed" in printed
    with get_client(sync_client=True) as client:
        where = DeploymentFilter(name=DeploymentFilterName(any_=["nightly"]))
        completed = FlowRunFilter(state=FlowRunFilterState(type=StateTypeFilter(any_=[StateType.COMPLETED])))
        (run,) = client.read_flow_runs(deployment_filter=where, flow_run_filter=completed)
        assert {"train-ddp-report", "train-ddp-progress"} <= artifacts_of(run.id).keys()
        scheduled = FlowRunFilter(state=FlowRunFilterState(type=StateTypeFilter(any_=[StateType.SCHEDULED])))
        deadline = time.monotonic() + 60
        while not (found := client.read_flow_runs(deployment_filter=where, flow_run_filter=scheduled)):
            assert time.monotonic() < deadline, "the cron schedule made no run"
            time.sleep(0.5)
        assert found[0].parameters.keys() == {"params"}


def test_prefect_yaml_keeps_runs_apart() -> None:
    """E3: a cron with a time zone, and no overlapping runs."""
    (nightly,) = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text())["deployments"]
    (schedule,) = nightly["schedules"]
    assert schedule["cron"]
    assert schedule["timezone"]
    assert nightly["concurrency_limit"]["limit"] == 1


def test_cancel_leaves_nothing(deployed: str, tmp_path: Path) -> None:
    """E5 in part: `prefect flow-run cancel`: ranks, workers and hosts are gone within seconds, the state is Cancelled."""
    folder = tmp_path / "pids"
    folder.mkdir()
    options = {"pid_folder": str(folder), "epochs": 100_000}
    params = {"workload": "tests.workloads.tiny", "storage": str(tmp_path / "store"), "options": options}
    prefect("deployment", "run", "train-ddp/nightly", "--param", f"params={json.dumps(params)}")
    ranks = pids_in(folder, 2, timeout_s=120)
    family = [psutil.Process(pid) for pid in ranks]
    family += [parent for rank in family for parent in rank.parents() if "prefect_torch_ddp.rank.host" in parent.cmdline()]
    with get_client(sync_client=True) as client:
        running = FlowRunFilter(state=FlowRunFilterState(type=StateTypeFilter(any_=[StateType.RUNNING])))
        (run,) = client.read_flow_runs(flow_run_filter=running)
        prefect("flow-run", "cancel", str(run.id))
        wait_until(lambda: not any(process.is_running() for process in family), 30)
        wait_until(lambda: client.read_flow_run(run.id).state_name == "Cancelled", 30)
