"""A deployment's run on a real server, a process work pool and a worker is cancelled, suspended or
killed, or fails."""

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.flow_runs import suspend_flow_run
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_torch_ddp import CheckpointParams, TrainParams
from prefect_torch_ddp.checkpoint.keys import finished_key
from prefect_torch_ddp.results import TrainingSummary
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.formats import FINISHED
from tests.integration.tasks.test_cancel import (
    check_cancelled,
    check_flow_cancelled,
    newest_run,
    params_of,
    steps_saved,
    wait_for_checkpoint,
)
from tests.support.gangs import pids_in
from tests.support.runs import (
    logs_of,
    newest_flow_run,
    steered,
    train_states,
    wait_until_said,
)
from tests.support.waiting import wait_until
from tests.support.workers import ROOT, prefect, worker_running

pytestmark = pytest.mark.long

MAX_LINES = 5
"""Of warnings and errors about a cancel: what each rank, the task and the flow say at most."""

MAX_SEEN = 12
"""Of all lines that the terminal shows of it, but what the workload prints."""

FAULT = {"fault": {"how": "raise", "step": 5, "rank": 1, "attempts": [1, 2]}}


@pytest.fixture(scope="module", autouse=True)
def terminal(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Deploy deployments/prefect.yaml and run a worker; give the file with what it prints."""
    with (
        pytest.MonkeyPatch.context() as patch,
        temporary_settings({PREFECT_API_URL: prefect_server}),
    ):
        patch.setenv("PREFECT_API_URL", prefect_server)
        patch.setenv("WHEN_BUSY", "ENQUEUE")
        file = tmp_path_factory.mktemp("worker") / "terminal.log"
        with worker_running(file):
            prefect("deploy", "--name", "nightly", "--prefect-file", "deployments/prefect.yaml")
            yield file
        print(file.read_text(encoding="utf-8"))


def begin(params: TrainParams) -> UUID:
    """Ask for a run; return its flow run's id."""
    given = {"params": params.model_dump(mode="json")}
    run: Any = run_deployment("train-ddp/nightly", parameters=given, timeout=0)  # s: don't wait
    return UUID(str(run.id))


def test_cancel_leaves_a_checkpoint_and_nothing_else(tmp_path: Path, terminal: Path) -> None:
    """`prefect flow-run cancel` leaves one checkpoint, no ranks and the states Cancelled.

    The run's log has one line of level ERROR, Prefect's last one of the task, and no traceback.
    Nor has what the worker's terminal shows.
    """
    begin(params_of(tmp_path))
    ranks = [psutil.Process(pid) for pid in pids_in(tmp_path / "pids", 2, timeout_s=150)]
    above = {parent for rank in ranks for parent in rank.parents()}
    servers = [
        each for each in above if "prefect_torch_ddp.rank.process.fork_server" in each.cmdline()
    ]
    assert servers
    wait_for_checkpoint(tmp_path)
    prefect("flow-run", "cancel", str(newest_run()[0]))
    wait_until(lambda: not any(process.is_running() for process in (*ranks, *servers)))
    check_cancelled(tmp_path)
    flow_run_id = check_flow_cancelled("cancelled in Prefect: all ranks stopped after step")
    wait_until_said(flow_run_id, "Flow run was cancelled.")
    lines = [line for line in logs_of(flow_run_id) if line.level >= logging.WARNING]
    errors = [line.message for line in lines if line.level >= logging.ERROR]
    assert [text.partition("(")[0] for text in errors] == ["Finished in state Cancelled"]
    assert sum(line.message.count("\n") + 1 for line in lines) <= MAX_LINES, lines
    seen = terminal.read_text(encoding="utf-8").partition("cancelled: the task gets 20 s")[2]
    told = [line for line in seen.splitlines() if not re.search(r"\] step \d+$", line)]
    assert 0 < len(told) <= MAX_SEEN, seen
    assert "Traceback" not in seen


def test_a_failed_run_is_logged_without_the_frames_of_prefect(tmp_path: Path) -> None:
    """No line of a deployed run's log is a traceback but the rank's own, in the user's code."""
    params = TrainParams(workload="tests.workloads.tiny", storage=str(tmp_path), options=FAULT)
    failed = begin(params)
    wait_until_said(failed, "Finished in state Failed", "RankFailedError")
    wait_until_said(failed, "Engine execution exited")
    lines = [line.message for line in logs_of(failed)]
    assert not [text for text in lines if "site-packages/prefect/" in text]


def test_a_suspended_run_goes_on_once_it_is_resumed(tmp_path: Path) -> None:
    """A suspended run saves and ends its process, and a new process completes it."""
    begin(steered(tmp_path))
    ranks = pids_in(tmp_path, 2, timeout_s=150)
    wait_until((tmp_path / "step").exists)
    flow_run_id, run_id = newest_run()
    suspend_flow_run(flow_run_id=flow_run_id)
    wait_until(lambda: not any(map(psutil.pid_exists, ranks)))
    (saved,) = steps_saved(tmp_path, run_id)
    with get_client(sync_client=True) as client:

        def state() -> str:
            return str(client.read_flow_run(flow_run_id).state_name)

        assert state() == "Suspended"
        client.resume_flow_run(flow_run_id)
        wait_until(lambda: not set(pids_in(tmp_path, 2)) & set(ranks), 150)
        (tmp_path / "enough").touch()
        wait_until(lambda: state() == "Completed")
    summary = summary_of(tmp_path, run_id)
    assert (summary.attempt, summary.resumed_from_step) == (2, saved)


def test_a_killed_run_is_resumed_by_the_automation(tmp_path: Path) -> None:
    """The flow's process gets SIGKILL in mid training: no task run stays open, and a new run
    continues from the newest checkpoint."""
    register = [sys.executable, "deployments/resume_crashed.py", "train-ddp/nightly"]
    subprocess.run([*register, "--after", "5"], cwd=ROOT, check=True, timeout=120)
    saving = CheckpointParams(every_s=None, every_steps=5)
    begin(steered(tmp_path, checkpoint=saving))
    ranks = pids_in(tmp_path, 2, timeout_s=150)
    wait_for_checkpoint(tmp_path)
    killed, run_id = newest_flow_run(), newest_run()[1]
    assert killed.infrastructure_pid is not None  # host:pid
    psutil.Process(int(killed.infrastructure_pid.rpartition(":")[2])).kill()
    wait_until(lambda: newest_flow_run().id != killed.id, what="a run that the automation makes")
    resumed = newest_flow_run()
    assert resumed.parameters["params"]["resume_from"] == f"flow-run:{killed.id}"
    wait_until(lambda: not set(pids_in(tmp_path, 2)) & set(ranks), 150)
    (tmp_path / "enough").touch()
    with get_client(sync_client=True) as client:
        wait_until(lambda: client.read_flow_run(resumed.id).state_name == "Completed")
        assert client.read_flow_run(killed.id).state_name == "Crashed"
    assert train_states(killed.id) == ["Crashed"]
    assert newest_run()[1] != run_id
    summary = summary_of(tmp_path, newest_run()[1])
    # A multiple of 5, unless the dying cluster's workers heard of it in time to save once more.
    assert summary.resumed_from_step == max(steps_saved(tmp_path, run_id))


def summary_of(folder: Path, run_id: str) -> TrainingSummary:
    """Read what a run's training has left at its end."""
    storage = DirectoryStorage(folder / "store")
    stored = FINISHED.from_bytes(storage.read(finished_key(run_id)), storage.uri)
    return TrainingSummary.model_validate(stored)
