"""A training that hangs under Prefect: found, named in the run's state and log, ended, and
resumed by a retry."""

import re
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.sorting import FlowRunSort

from prefect_torch_ddp import CheckpointParams, GangHungError, TrainParams, train_flow
from tests.integration.runs import flow_run_id_of, logs_of, states_of, task_runs_of

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("prefect_api")]


def hanging(folder: Path, *, max_restarts: int, retries: int) -> TrainParams:
    """Describe a training whose rank 1 hangs in step 6, behind the first checkpoint."""
    return TrainParams(
        workload="tests.workloads.tiny",
        storage=str(folder),
        options={"fault": {"how": "hang", "rank": 1, "step": 6, "attempts": [1]}},
        checkpoint=CheckpointParams(every_steps=2, every_s=None),
        max_restarts=max_restarts,
        retries=retries,
        retry_delay_s=0,
        progress_timeout_s=4.0,
    )


@pytest.mark.parametrize(("max_restarts", "retries"), [(0, 1), (1, 0)])
def test_a_hang_is_tried_again_and_resumed(tmp_path: Path, max_restarts: int, retries: int) -> None:
    """The log names rank, step and line, and has all ranks' stacks; a retry or a restart
    resumes from the checkpoint."""
    report = train_flow(hanging(tmp_path, max_restarts=max_restarts, retries=retries))
    assert report.training.attempt == 2
    assert report.training.resumed_from_step in (2, 4)
    flow_run_id = flow_run_id_of(report.flow_run_url)
    states = states_of(task_runs_of(flow_run_id)["train"])
    assert ("Retrying" in dict(states)) is (retries == 1)
    log = [line.message for line in logs_of(flow_run_id)]
    said = r"hung in attempt 1: rank 1 on 127\.0\.0\.1 did not arrive: for \d+ s it has been in step 6 at tiny\.py:\d+ in fail"
    assert any(re.search(said, message) for message in log)
    for rank in (0, 1):
        stacks = next(
            message
            for message in log
            if message.startswith(f"[rank {rank}] is at, the innermost call first:")
        )
        assert "in train" in stacks


def test_a_hang_without_retries_is_the_flows_error(tmp_path: Path) -> None:
    """The exception keeps its type and fields over Dask and Prefect, and the task's state says
    the same."""
    with pytest.raises(GangHungError, match=r"rank 1 on 127\.0\.0\.1 did not arrive") as caught:
        train_flow(hanging(tmp_path, max_restarts=0, retries=0))
    assert (caught.value.ranks, caught.value.hang.step, caught.value.attempt) == ((1,), 6, 1)
    assert sorted(caught.value.stacks) == [0, 1]
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC)
    failed = next(
        run for run in runs if run.start_time is not None
    )  # those that a schedule has made have none yet
    name, message = states_of(task_runs_of(failed.id)["train"])[-1]
    assert name == "Failed"
    assert "rank 1 on 127.0.0.1 did not arrive" in message
