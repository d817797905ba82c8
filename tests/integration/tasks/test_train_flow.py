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
from distributed import LocalCluster
from safetensors.torch import load_file

from prefect_torch_ddp import CheckpointParams, ClusterParams, TrainParams, TrainReport, train_flow
from prefect_torch_ddp.checkpoint.manifest import list_checkpoints
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.runs import (
    artifacts_of,
    flow_run_id_of,
    logs_of,
    task_runs_of,
    wait_until_said,
)


@pytest.fixture(scope="module")
def two_runs(
    prefect_server: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainReport, TrainReport]:
    """Train the digits twice with the same parameters and storage."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    storage = tmp_path_factory.mktemp("storage")
    params = TrainParams(workload="prefect_torch_ddp.examples.digits", storage=str(storage), seed=7)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        return train_flow(params), train_flow(params)


@pytest.mark.usefixtures("prefect_api")
def test_digits_are_learnt(two_runs: tuple[TrainReport, TrainReport]) -> None:
    """A typed report: at least 97 % on the held-out split, every class scored, the matrix square
    and complete; one row an epoch, with the mean loss over all ranks' samples and validation."""
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
        "import torch; from prefect_torch_ddp.examples.digits import DigitNet; net = DigitNet();"
        "from safetensors.torch import load_file;"
        f"net.load_state_dict(load_file({report.model_uri!r})); print('loaded')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "loaded", done.stderr
    assert report.model_uri is not None
    card = json.loads(Path(report.model_uri).with_name("model.json").read_bytes())
    assert (card["workload"], card["seed"], card["step"]) == (
        "prefect_torch_ddp.examples.digits",
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


def test_nothing_configured(tmp_path: Path) -> None:
    """E1: without any server configured: an embedded one, a local cluster, local storage; a
    typed report."""
    code = (
        "from prefect_torch_ddp import TrainParams, train_flow\n"
        "if __name__ == '__main__':\n"
        "    params = TrainParams(workload='tests.workloads.tiny',"
        f" storage={str(tmp_path / 'store')!r})\n"
        "    report = train_flow(params)\n"
        "    print(type(report).__name__, report.evaluation.num_samples)\n"
    )
    script = tmp_path / "run.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout.strip().splitlines()[-1:] == ["TrainReport 21"], done.stderr[-3000:]


@pytest.mark.usefixtures("prefect_api")
def test_the_best_checkpoint_is_evaluated(dask_cluster: LocalCluster, tmp_path: Path) -> None:
    """D2: with evaluate_on="best" the published checkpoint is the one with the lowest reported
    loss. A14: what both ranks print is in the run's log, the rank in front."""
    policy = CheckpointParams(every_steps=3, keep_last=20, best_metric="loss", best_mode="min")
    report = train_flow(
        TrainParams(
            workload="tests.workloads.tiny",
            storage=str(tmp_path),
            cluster=ClusterParams(address=dask_cluster.scheduler_address),
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
    flow_run_id = flow_run_id_of(report.flow_run_url)
    for rank in (0, 1):
        wait_until_said(flow_run_id, f"[rank {rank}] step 1")


@pytest.mark.usefixtures("prefect_api")
def test_a_workload_whose_module_imports_prefect_still_logs(
    dask_cluster: LocalCluster, tmp_path: Path
) -> None:
    """A14: Prefect configures logging when it loads; the ranks' records reach the run's log all
    the same."""
    report = train_flow(
        TrainParams(
            workload="tests.workloads.flows:Logging",
            storage=str(tmp_path),
            cluster=ClusterParams(address=dask_cluster.scheduler_address),
            world_size=1,
        )
    )
    flow_run_id = flow_run_id_of(report.flow_run_url)
    wait_until_said(flow_run_id, "checkpoint of step")
    said = "[rank 0] user.code: logged by user code"
    wait_until_said(flow_run_id, said)
    assert [line.message for line in logs_of(flow_run_id)].count(said) == 1
