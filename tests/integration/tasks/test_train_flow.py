"""The digits are trained end to end, twice, on a real Prefect server and a local Dask cluster."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed import LocalCluster
from safetensors.torch import load_file

from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    TrainParams,
    TrainReport,
    read_metrics,
    train_flow,
)
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.report.artifacts import key
from tests.support.gangs import by_rank
from tests.support.runs import (
    artifacts_of,
    flow_run_id_of,
    logs_of,
    task_runs_of,
    wait_until_said,
)

DIGITS = "prefect_torch_ddp.examples.digits"


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_digits_are_learnt_twice(dask_cluster: LocalCluster, tmp_path: Path) -> None:
    """The second run with the same parameters repeats what the first one learnt."""
    params = TrainParams(
        workload=DIGITS,
        storage=str(tmp_path),
        cluster=ClusterParams(address=dask_cluster.scheduler_address),
        seed=7,
    )
    first, second = train_flow(params), train_flow(params)
    check_that_digits_are_learnt(first)
    check_that_nothing_was_prepared_and_the_weights_are_the_same(first, second)
    check_artifacts(second)


def check_that_digits_are_learnt(report: TrainReport) -> None:
    """A typed report: at least 97 % on the held-out split, every class scored, the matrix square
    and complete; one row an epoch, with the mean loss over all ranks' samples and validation."""
    assert isinstance(report, TrainReport)
    evaluation = report.evaluation
    matrix = evaluation.confusion_matrix
    assert evaluation.accuracy is not None
    assert evaluation.accuracy >= 0.97
    assert evaluation.num_samples == sum(map(sum, matrix))
    assert evaluation.num_samples == sum(score.support for score in evaluation.classes)
    assert [score.name for score in evaluation.classes] == list("0123456789")
    assert {len(row) for row in matrix} == {10}
    assert evaluation.accuracy == sum(matrix[i][i] for i in range(10)) / evaluation.num_samples
    assert len(evaluation.worst_samples) == 8
    assert len(evaluation.model_dump_json()) < 6_000, "a result is stored and sent whole"
    assert [row.epoch for row in report.epochs] == list(range(1, report.training.num_epochs + 1))
    for row in report.epochs:
        assert {"loss", "validation_accuracy", "validation_loss"} <= row.metrics.keys()
    assert len({row.num_samples for row in report.epochs}) == 1
    assert report.epochs[-1].metrics["loss"] < report.epochs[0].metrics["loss"]


def check_that_nothing_was_prepared_and_the_weights_are_the_same(
    first: TrainReport, second: TrainReport
) -> None:
    """The second run's prepare is Cached; split and weights are the same by the seed. A card
    is next to the weights."""
    for report, state in ((first, "Completed"), (second, "Cached")):
        runs = task_runs_of(flow_run_id_of(report.flow_run_url), "prepare")
        assert runs["prepare"].state_name == state
    assert first.dataset == second.dataset
    models = [Path(str(run.model_uri)) for run in (first, second)]
    digests = [hashlib.sha256(model.read_bytes()).hexdigest() for model in models]
    assert digests[0] == digests[1]
    assert first.evaluation == second.evaluation
    card = json.loads(models[0].with_name("model.json").read_bytes())
    expected = (DIGITS, 7, first.checkpoint.step)
    assert (card["workload"], card["seed"], card["step"]) == expected
    assert card["dataset"]["digest"] == first.dataset.digest
    assert card["sha256"] == digests[0]
    assert card["metrics"] == first.checkpoint.metrics


def check_artifacts(report: TrainReport) -> None:
    """Progress, the report with its curve, epoch table, confusion matrix, worst samples, and
    the places of the checkpoints."""
    flow_run_id = flow_run_id_of(report.flow_run_url)
    progress, page = (
        artifacts_of(flow_run_id)[key(kind, f"train-ddp/{DIGITS}")]
        for kind in ("progress", "report")
    )
    assert progress.data == 100
    assert str(page.data).startswith("# digits: finished\n\naccuracy ")
    html = Path(str(report.report_uri)).read_text(encoding="utf-8")
    assert html.count("<h2>") > 5
    assert f'href="{report.flow_run_url}"' in html
    last = [f"the run in Prefect: {report.flow_run_url}", f"the report: {report.report_uri}"]
    for text in last:
        wait_until_said(flow_run_id, text)
    said = [line.message for line in logs_of(flow_run_id)]
    lines = [line for line in said if not line.startswith("Finished in state")]
    assert sorted(lines[-2:]) == sorted(last)  # the server's has equal times
    assert "data:image/svg+xml;base64," in str(page.data)
    assert report.checkpoint.uri in str(page.data)
    for section in ("Epochs", "Confusion matrix", "Worst samples", "Model and checkpoints"):
        assert f"\n## {section}\n" in str(page.data)
    assert "| F1 since the last run |" in str(page.data)


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_the_best_checkpoint_is_evaluated(dask_cluster: LocalCluster, tmp_path: Path) -> None:
    """`evaluate_on="best"` publishes the checkpoint with the lowest loss, and all lines are
    logged."""
    report = train_flow(
        TrainParams(
            workload="tests.workloads.flows:Logging",
            storage=str(tmp_path),
            cluster=ClusterParams(address=dask_cluster.scheduler_address),
            checkpoint=CheckpointParams(
                every_s=None, every_steps=3, keep_last=20, best_metric="loss", best_mode="min"
            ),
            evaluate_on="best",
        )
    )
    kept = list_manifests(DirectoryStorage(tmp_path), report.run_id)
    assert len(kept) >= 3
    assert report.checkpoint.metrics["loss"] == min(ref.metrics["loss"] for ref in kept)
    assert report.checkpoint == report.training.best_checkpoint
    metrics = read_metrics(DirectoryStorage(tmp_path), report.run_id)
    of_step = metrics[metrics["step"] == report.checkpoint.step]
    assert len(of_step) == 2
    mean = np.average(of_step["loss"], weights=of_step["num_samples"])
    assert report.checkpoint.metrics["loss"] == pytest.approx(mean, rel=1e-12), "of both ranks"
    card = json.loads(Path(str(report.model_uri)).with_name("model.json").read_bytes())
    assert card["step"] == report.checkpoint.step
    where = f"checkpoints/step-{card['step']:08d}/{card['attempt']:06d}/model.pt"
    evaluated = DirectoryStorage(tmp_path).read(f"runs/{report.run_id}/{where}")
    weights = torch.load(io.BytesIO(evaluated), weights_only=True)
    exported = load_file(str(report.model_uri))
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    flow_run_id = flow_run_id_of(report.flow_run_url)
    wait_until_said(flow_run_id, "checkpoint at step")
    logged = [f"[rank {rank}] user.code: logged by user code" for rank in (0, 1)]
    for said in (*logged, "[rank 0] step 1", "[rank 1] step 1"):
        wait_until_said(flow_run_id, said)
    messages = by_rank(line.message for line in logs_of(flow_run_id))
    assert [messages.count(said) for said in logged] == [1, 1]
