"""E5: a run that is cancelled, by Ctrl-C, SIGTERM or Prefect: one step, its checkpoint, state
Cancelled, no retry."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import FlowRunSort

from prefect_torch_ddp import CheckpointParams, ClusterParams, TrainParams
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.run import run_id_of
from tests.integration.gang.test_failures import pids_in, wait_until
from tests.integration.runs import logs_of, states_of, task_runs_of
from tests.integration.separate_cluster import separate_cluster

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_api")]

FLOW = """
import sys
from prefect_torch_ddp import TrainParams, train_flow
if __name__ == "__main__":
    train_flow(TrainParams.model_validate_json(sys.argv[1]))
"""


def params_of(folder: Path, **more: object) -> TrainParams:
    """Train for ever, with a checkpoint every 50 steps."""
    (folder / "pids").mkdir()
    return TrainParams(
        workload="tests.workloads.tiny",
        storage=str(folder / "store"),
        options={"pid_folder": str(folder / "pids"), "epochs": 1_000_000},
        checkpoint=CheckpointParams(every_steps=50, every_s=None),
        **more,
    )


def newest_run() -> tuple[UUID, str]:
    """Return the flow run that began last, and its id in the storage."""
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC)
    run = next(
        run for run in runs if run.start_time is not None
    )  # those that a schedule has made have none yet
    return run.id, run_id_of(run.name, run.id)


def steps_saved(folder: Path, run_id: str) -> list[int]:
    """Return the steps of the run's checkpoints."""
    return [
        manifest.step for manifest in list_manifests(DirectoryStorage(folder / "store"), run_id)
    ]


def start(
    folder: Path, params: TrainParams, num_ranks: int = 2
) -> tuple[subprocess.Popen[str], list[int]]:
    """Run the flow in a process group of its own; return it and its ranks."""
    script = folder / "flow.py"
    script.write_text(FLOW)
    command = [sys.executable, str(script), params.model_dump_json()]
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return process, pids_in(folder / "pids", num_ranks, timeout_s=150)


def start_training(folder: Path, params: TrainParams) -> tuple[subprocess.Popen[str], list[int]]:
    """Run the flow; return it and its ranks once a checkpoint is there."""
    process, ranks = start(folder, params)
    wait_until(lambda: bool(steps_saved(folder, newest_run()[1])), 60)
    return process, ranks


def check_cancelled(folder: Path) -> None:
    """Expect flow run and task run Cancelled, with the step that all ranks agreed on, and that
    step's checkpoint."""
    flow_run_id, run_id = newest_run()
    with get_client(sync_client=True) as client:
        wait_until(lambda: client.read_flow_run(flow_run_id).state_name == "Cancelled", 40)
    task_run = task_runs_of(flow_run_id)["train"]
    name, message = states_of(task_run)[-1]
    assert name == "Cancelled"
    assert not {"AwaitingRetry", "Retrying"} & {name for name, _ in states_of(task_run)}
    found = re.search(
        r"all ranks stopped after step (\d+); the newest checkpoint is of step (\d+)", message
    )
    assert found is not None, (
        message,
        states_of(task_run),
        [line.message for line in logs_of(flow_run_id)][-40:],
    )
    assert found[1] == found[2]
    assert int(found[1]) in steps_saved(folder, run_id)


@pytest.mark.parametrize(("how", "to_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_ctrl_c_and_sigterm_of_the_flow(
    tmp_path: Path, how: signal.Signals, to_group: bool
) -> None:
    """Ctrl-C in a terminal, which reaches the local cluster too, and SIGTERM of the flow's
    process."""
    process, ranks = start_training(tmp_path, params_of(tmp_path))
    (os.killpg if to_group else os.kill)(process.pid, how)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), 25)
    said, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "CancelledRun" in said, said[-3000:]
    check_cancelled(tmp_path)


def test_sigterm_of_a_flow_on_the_cluster_of_others(tmp_path: Path) -> None:
    """The cluster goes on to live, and the next run on it works."""
    with separate_cluster(tmp_path / "cluster") as cluster:
        on_it = ClusterParams(address=cluster.address)
        process, ranks = start_training(tmp_path, params_of(tmp_path, cluster=on_it))
        process.terminate()
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), 25)
        process.communicate(timeout=60)
        check_cancelled(tmp_path)
        next_run = TrainParams(
            workload="tests.workloads.tiny", storage=str(tmp_path / "store"), cluster=on_it
        )
        command = [sys.executable, str(tmp_path / "flow.py"), next_run.model_dump_json()]
        subprocess.run(command, check=True, timeout=150, capture_output=True)


@pytest.mark.parametrize(("stage", "num_ranks"), [("prepare", 1), ("evaluate", 2)])
def test_cancel_of_a_run_that_does_not_train(tmp_path: Path, stage: str, num_ranks: int) -> None:
    """What only prepares or evaluates has nothing to save: its ranks go at once, and its states
    are Cancelled as well."""
    (tmp_path / "pids").mkdir()
    linger = {"stage": stage, "pids": str(tmp_path / "pids")}
    params = TrainParams(
        workload="tests.workloads.lingers",
        storage=str(tmp_path / "store"),
        data_options={"linger": linger},
    )
    process, ranks = start(tmp_path, params, num_ranks)
    process.terminate()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), 25)
    said, _ = process.communicate(timeout=60)
    assert "CancelledRun" in said, said[-3000:]
    flow_run_id, _ = newest_run()
    with get_client(sync_client=True) as client:
        wait_until(lambda: client.read_flow_run(flow_run_id).state_name == "Cancelled", 40)
    assert states_of(task_runs_of(flow_run_id)[stage])[-1][0] == "Cancelled"
