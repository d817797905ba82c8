"""Restarts within the task train: no retry of Prefect's is used, the report tells of each
attempt; retries come after."""

from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort

from prefect_torch_ddp import CheckpointParams, RankFailedError, TrainParams, train_flow
from tests.integration.runs import artifacts_of, flow_run_id_of, logs_of, states_of, task_runs_of

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("prefect_api")]


def params(storage: Path, **changes: Any) -> TrainParams:
    """Return parameters of the tiny workload, with a checkpoint every five steps."""
    given = {
        "workload": "tests.workloads.tiny",
        "storage": str(storage),
        "seed": 3,
        "retry_delay_s": 0.1,
    }
    return TrainParams(**given, checkpoint=CheckpointParams(every_steps=5), **changes)


def named_states(flow_run_id: Any) -> list[str]:
    """Return the states that the task train went through, but for those of any task run."""
    states = states_of(task_runs_of(flow_run_id)["train"])
    return [name for name, _ in states if name not in ("Pending", "Running")]


def test_a_killed_rank_costs_no_retry(tmp_path: Path) -> None:
    """Rank 1 is killed at step 12: attempt 2 resumes in the same task run, to the very same
    weights; the report names both."""
    fault = {"how": "SIGKILL", "step": 12, "rank": 1, "attempts": [1]}
    report = train_flow(params(tmp_path, options={"fault": fault}, retries=0, ledger=True))
    training = report.training
    assert (training.attempt, training.world_size) == (2, 2)
    assert training.resumed_from_step in (5, 10)
    (failure,) = training.failures
    assert (failure.attempt, failure.world_size, failure.step) == (1, 2, 12)
    assert "rank 1 on 127.0.0.1 failed in attempt 1: was killed by SIGKILL (9)" in failure.summary
    flow_run_id = flow_run_id_of(report.flow_run_url)
    assert named_states(flow_run_id) == ["Completed"]
    log = [line.message for line in logs_of(flow_run_id)]
    assert any("was killed by SIGKILL (9)" in line and "restart 1 of 2" in line for line in log)
    for attempt in (1, 2):
        assert any(
            f"attempt {attempt} trains tests.workloads.tiny on 2 ranks" in line for line in log
        )
    page = str(artifacts_of(flow_run_id)["train-ddp-report"].data)
    assert "## Failed attempts" in page
    assert "failed in attempt 1: was killed by SIGKILL" in page
    assert report.ledger is not None
    assert report.ledger.is_clean
    assert len(report.ledger.epochs) == report.training.num_epochs
    assert "## Ledger" in page
    assert "samples, each once" in page
    assert "not clean" not in page
    assert any("the ledger of" in line and "is clean" in line for line in log)
    undisturbed = train_flow(params(tmp_path))
    assert Path(undisturbed.model_uri).read_bytes() == Path(report.model_uri).read_bytes()
    assert report.epochs == undisturbed.epochs
    assert undisturbed.training.failures == ()
    assert undisturbed.ledger is None


def test_prefects_retries_come_after_the_restarts(tmp_path: Path) -> None:
    """One restart, used up by a second kill; then one retry of Prefect's, which resumes."""
    fault = {"how": "SIGKILL", "step": 12, "rank": 1, "attempts": [1, 2]}
    report = train_flow(params(tmp_path, options={"fault": fault}, retries=1, max_restarts=1))
    assert report.training.attempt == 3
    assert report.training.resumed_from_step in (5, 10)
    assert [failure.attempt for failure in report.training.failures] == [1, 2]
    assert named_states(flow_run_id_of(report.flow_run_url)) == [
        "AwaitingRetry",
        "Retrying",
        "Completed",
    ]


@pytest.mark.parametrize(("max_restarts", "between"), [(3, []), (0, ["AwaitingRetry", "Retrying"])])
def test_an_error_that_comes_back_is_not_tried_a_third_time(
    tmp_path: Path, max_restarts: int, between: list[str]
) -> None:
    """The same ValueError at the same step ends it after the second attempt, a restart or a
    retry; the message says why."""
    fault = {"how": "raise", "step": 7, "rank": 0, "attempts": list(range(1, 9))}
    says = "not tried again: the same ValueError at step 7 ended attempt 1 too"
    with pytest.raises(RankFailedError, match=says) as caught:
        train_flow(params(tmp_path, options={"fault": fault}, retries=3, max_restarts=max_restarts))
    assert caught.value.attempt == 2
    assert isinstance(caught.value.__cause__, ValueError)
    with get_client(sync_client=True) as client:
        failed = FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.FAILED]))
        )
        newest = client.read_flow_runs(
            flow_run_filter=failed, sort=FlowRunSort.START_TIME_DESC, limit=1
        )[0]
    assert named_states(newest.id) == [*between, "Failed"]
    assert says in states_of(task_runs_of(newest.id)["train"])[-1][1]
