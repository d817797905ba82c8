"""The main job: the digits, end to end, twice, on a real Prefect server and a real local Dask
cluster."""

import hashlib
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort
from safetensors.torch import load_file

from prefect_torch_ddp import (
    CheckpointParams,
    RankFailedError,
    TrainParams,
    TrainReport,
    train_flow,
)
from prefect_torch_ddp.checkpoint.manifest import list_checkpoints
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.runs import artifacts_of, flow_run_id_of, logs_of, states_of, task_runs_of

pytestmark = [pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def two_runs(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainReport, TrainReport]:
    """Train the digits twice with the same parameters and storage."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    storage = tmp_path_factory.mktemp("storage")
    params = TrainParams(workload="flows.digits", storage=str(storage), seed=7)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        return train_flow(params), train_flow(params)


@pytest.mark.usefixtures("prefect_api")
def test_digits_are_learnt(two_runs: tuple[TrainReport, TrainReport]) -> None:
    """A typed report: at least 97 % on the held-out split, every class scored, the matrix
    square and complete."""
    report = two_runs[0]
    assert isinstance(report, TrainReport)
    evaluation = report.evaluation
    assert evaluation.accuracy is not None
    assert evaluation.accuracy >= 0.97
    assert (
        evaluation.num_samples
        == sum(map(sum, evaluation.confusion_matrix))
        == sum(c.support for c in evaluation.classes)
    )
    assert [score.name for score in evaluation.classes] == list("0123456789")
    assert {len(row) for row in evaluation.confusion_matrix} == {10}
    right = sum(evaluation.confusion_matrix[i][i] for i in range(10))
    assert evaluation.accuracy == right / evaluation.num_samples
    assert report.training.duration_s < 60


@pytest.mark.usefixtures("prefect_api")
def test_one_row_an_epoch_with_validation(two_runs: tuple[TrainReport, TrainReport]) -> None:
    """D4, C2: per-epoch history with the mean loss over all samples of all ranks, and
    validation."""
    report = two_runs[0]
    assert [row.epoch for row in report.epochs] == list(range(1, report.training.num_epochs + 1))
    for row in report.epochs:
        assert {"loss", "validation_accuracy", "validation_loss"} <= row.metrics.keys()
    assert len({row.num_samples for row in report.epochs}) == 1
    assert report.epochs[-1].metrics["loss"] < report.epochs[0].metrics["loss"]


@pytest.mark.usefixtures("prefect_api")
def test_the_model_loads_with_plain_torch(two_runs: tuple[TrainReport, TrainReport]) -> None:
    """D5: the weights load in a process without this package's storage code and without
    `module.`; a card is beside them."""
    report = two_runs[0]
    code = (
        "import torch; from flows.digits import DigitNet; net = DigitNet();"
        f"from safetensors.torch import load_file; net.load_state_dict(load_file({report.model_uri!r})); print('loaded')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "loaded", done.stderr
    assert report.model_uri is not None
    card = json.loads(Path(report.model_uri).with_name("model.json").read_bytes())
    assert (card["workload"], card["seed"], card["step"]) == (
        "flows.digits",
        7,
        report.checkpoint.step,
    )
    assert card["dataset"]["digest"] == report.dataset.digest
    assert card["sha256"] == hashlib.sha256(Path(report.model_uri).read_bytes()).hexdigest()
    assert card["metrics"] == report.checkpoint.metrics


@pytest.mark.usefixtures("prefect_api")
def test_second_run_prepares_nothing_and_gives_the_same_weights(
    two_runs: tuple[TrainReport, TrainReport],
) -> None:
    """B8, B5, C6: the second run's prepare is Cached; split and weights are the same by the
    seed."""
    first, second = two_runs
    assert task_runs_of(flow_run_id_of(first.flow_run_url))["prepare"].state_name == "Completed"
    assert task_runs_of(flow_run_id_of(second.flow_run_url))["prepare"].state_name == "Cached"
    assert first.dataset == second.dataset
    digests = [hashlib.sha256(Path(run.model_uri).read_bytes()).hexdigest() for run in two_runs]
    assert digests[0] == digests[1]
    assert first.evaluation == second.evaluation


@pytest.mark.usefixtures("prefect_api")
def test_lines_of_both_ranks_are_in_the_runs_log(prefect_api: str, tmp_path: Path) -> None:
    """A14: the API's log filter shows what both ranks printed, with the rank in front."""
    report = train_flow(TrainParams(workload="tests.workloads.tiny", storage=str(tmp_path)))
    messages = [line.message for line in logs_of(flow_run_id_of(report.flow_run_url))]
    assert "[rank 0] step 1" in messages
    assert "[rank 1] step 1" in messages
    assert any(
        "attempt 1 trains tests.workloads.tiny on 2 ranks" in message for message in messages
    )


@pytest.mark.usefixtures("prefect_api")
def test_artifacts_to_browse(two_runs: tuple[TrainReport, TrainReport]) -> None:
    """Item 7: progress, the report with its curve, epoch table, confusion matrix, where the
    checkpoints are."""
    report = two_runs[1]
    artifacts = artifacts_of(flow_run_id_of(report.flow_run_url))
    assert {
        "train-ddp-progress",
        "train-ddp-report",
        "train-ddp-epochs",
        "train-ddp-confusion-matrix",
        "train-ddp-checkpoints",
    } <= artifacts.keys()
    assert "data:image/svg+xml;base64," in str(artifacts["train-ddp-report"].data)
    assert report.checkpoint.uri in str(artifacts["train-ddp-checkpoints"].data)
    assert artifacts["train-ddp-progress"].data == 100


@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize("how", ["raise", "SIGKILL"])
def test_a_retry_resumes_and_says_who_failed(tmp_path: Path, how: str) -> None:
    """E4: rank 1 fails at step 12; the retry resumes from a checkpoint; the log names rank,
    host and cause."""
    plain = TrainParams(
        workload="tests.workloads.tiny",
        storage=str(tmp_path),
        seed=3,
        checkpoint=CheckpointParams(every_steps=5),
    )
    fault = {"how": how, "step": 12, "rank": 1, "attempts": [1]}
    faulty = plain.model_copy(
        update={"options": {"fault": fault}, "retries": 1, "retry_delay_s": 0.1, "max_restarts": 0}
    )
    report = train_flow(faulty)
    assert report.training.attempt == 2
    assert report.training.resumed_from_step in (5, 10), (
        "the commit of step 10 may have been under way"
    )
    states = states_of(task_runs_of(flow_run_id_of(report.flow_run_url))["train"])
    assert [name for name, _ in states if name not in ("Pending", "Running")] == [
        "AwaitingRetry",
        "Retrying",
        "Completed",
    ]
    cause = "ValueError: told to fail" if how == "raise" else "was killed by SIGKILL (9)"
    log = [line.message for line in logs_of(flow_run_id_of(report.flow_run_url))]
    assert any(
        f"rank 1 on 127.0.0.1 failed in attempt 1: {cause}" in line
        and "Retry 1/1 will start" in line
        for line in log
    )
    undisturbed = train_flow(plain)
    assert Path(undisturbed.model_uri).read_bytes() == Path(report.model_uri).read_bytes()
    assert report.epochs == undisturbed.epochs


@pytest.mark.usefixtures("prefect_api")
def test_the_last_failure_reaches_the_caller(tmp_path: Path) -> None:
    """When retries are used up the flow raises the user's own error with rank, host and
    attempt."""
    fault = {"how": "raise", "step": 2, "rank": 0, "attempts": [1, 2]}
    params = TrainParams(
        workload="tests.workloads.tiny",
        storage=str(tmp_path),
        options={"fault": fault},
        retries=1,
        retry_delay_s=0.1,
        max_restarts=0,
    )
    says = "rank 0 on 127.0.0.1 failed in attempt 2: ValueError: told to fail"
    with pytest.raises(RankFailedError, match=says) as caught:
        train_flow(params)
    assert isinstance(caught.value.__cause__, ValueError)
    with get_client(sync_client=True) as client:
        failed = FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.FAILED]))
        )
        newest = client.read_flow_runs(
            flow_run_filter=failed, sort=FlowRunSort.START_TIME_DESC, limit=1
        )[0]
    name, message = states_of(task_runs_of(newest.id)["train"])[-1]
    assert name == "Failed"
    assert says in message


def test_nothing_configured(tmp_path: Path) -> None:
    """E1: without any server configured: an embedded one, a local cluster, local storage; a
    typed report."""
    code = (
        "from prefect_torch_ddp import TrainParams, train_flow\n"
        "if __name__ == '__main__':\n"
        f"    report = train_flow(TrainParams(workload='tests.workloads.tiny', storage={str(tmp_path / 'store')!r}))\n"
        "    print(type(report).__name__, report.evaluation.num_samples)\n"
    )
    script = tmp_path / "run.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.strip().splitlines()[-1:] == ["TrainReport 21"], done.stderr[-3000:]


@pytest.mark.usefixtures("prefect_api")
def test_the_best_checkpoint_is_evaluated(tmp_path: Path) -> None:
    """D2: with evaluate_on="best" the published checkpoint is the one with the lowest reported
    loss."""
    policy = CheckpointParams(every_steps=3, keep_last=20, best_metric="loss", best_mode="min")
    report = train_flow(
        TrainParams(
            workload="tests.workloads.tiny",
            storage=str(tmp_path),
            checkpoint=policy,
            evaluate_on="best",
        )
    )
    kept = list_checkpoints(DirectoryStorage(tmp_path), report.run_id)
    assert len(kept) >= 3
    assert report.checkpoint.metrics["loss"] == min(ref.metrics["loss"] for ref in kept)
    assert report.checkpoint == report.training.best_checkpoint
    assert report.model_uri is not None
    card = json.loads(Path(report.model_uri).with_name("model.json").read_bytes())
    assert card["step"] == report.checkpoint.step
    evaluated = DirectoryStorage(tmp_path).read(
        f"runs/{report.run_id}/checkpoints/step-{card['step']:08d}/{card['attempt']:06d}/model.pt"
    )
    weights = torch.load(io.BytesIO(evaluated), weights_only=True)
    exported = load_file(report.model_uri)
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


@pytest.mark.usefixtures("prefect_api")
def test_evaluation_runs_when_training_was_cached(tmp_path: Path) -> None:
    """D2: a flow run that is retried after its evaluation failed doesn't train again, and
    evaluates."""
    options = {"fail_evaluation_once": str(tmp_path / "failed")}
    params = TrainParams(
        workload="tests.workloads.tiny",
        storage=str(tmp_path / "store"),
        world_size=1,
        options=options,
    )
    report = train_flow.with_options(retries=1)(params)
    assert report.evaluation.num_samples == 21
    with get_client(sync_client=True) as client:
        where = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id_of(report.flow_run_url)]))
        runs = client.read_task_runs(flow_run_filter=where)
    assert "Cached" in {run.state_name for run in runs if run.name.startswith("train")}
    assert report.training.attempt == 1


@pytest.mark.usefixtures("prefect_api")
def test_a_workload_whose_module_imports_prefect_still_logs(tmp_path: Path) -> None:
    """A14: Prefect configures logging when it loads; the ranks' records reach the run's log all
    the same."""
    report = train_flow(
        TrainParams(workload="tests.workloads.imports_prefect", storage=str(tmp_path), world_size=1)
    )
    messages = [line.message for line in logs_of(flow_run_id_of(report.flow_run_url))]
    assert messages.count("[rank 0] user.code: logged by user code") == 1
    assert any("checkpoint of step" in message for message in messages)


@pytest.mark.usefixtures("prefect_api")
def test_death_of_the_worker_that_runs_the_task_itself(tmp_path: Path) -> None:
    """E8: SIGKILL of the train task's own Dask worker: the task run is Crashed, the training
    resumes from its checkpoint."""
    fault = {"how": "kill_grandparent", "step": 12, "rank": 0, "attempts": [1]}
    params = TrainParams(
        workload="tests.workloads.tiny",
        storage=str(tmp_path),
        world_size=1,
        options={"fault": fault},
        retries=1,
        checkpoint=CheckpointParams(every_steps=5),
    )
    report = train_flow(params)
    assert report.training.attempt == 2
    assert report.training.resumed_from_step in (5, 10)
    with get_client(sync_client=True) as client:
        where = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id_of(report.flow_run_url)]))
        runs = client.read_task_runs(flow_run_filter=where)
    states = sorted(run.state_name or "" for run in runs if run.name.startswith("train"))
    assert states == ["Completed", "Crashed"]
