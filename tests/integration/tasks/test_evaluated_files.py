"""What `ctx.save` wrote in an evaluation: `read_result` reads that of the published model."""

from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    ObjectNotFoundError,
    TrainParams,
    evaluate_flow,
    read_result,
    train_flow,
)
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("prefect_api"),
]

KILLED = {"how": "SIGKILL", "step": 12, "rank": 1, "attempts": [1]}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "the last one, then the first one again": ({}, 0),
    "the best one is an older attempt's, then the last one again": (
        {"evaluate_on": "best", "options": {"fault": KILLED}, "max_restarts": 1},
        -1,
    ),
}


@pytest.mark.parametrize(("changes", "index"), CASES.values(), ids=CASES)
def test_another_evaluation_replaces_no_file_of_the_published_model(
    changes: dict[str, Any], index: int, shared: ClusterParams, tmp_path: Path
) -> None:
    """That of `evaluate_flow` has its own place, by the checkpoint's step."""
    # The highest loss is that of the first checkpoint.
    about: dict[str, Any] = {"best_metric": "loss", "best_mode": "max", "keep_last": 20}
    report = train_flow(
        TrainParams(
            workload="tests.workloads.tiny:Noting",
            storage=str(tmp_path),
            seed=3,
            retries=0,
            cluster=shared,
            checkpoint=CheckpointParams(every_s=None, every_steps=5, **about),
            **changes,
        )
    )
    published, run_id = report.checkpoint, report.run_id
    if changes:
        assert (published.attempt, report.training.attempt) == (1, 2)
    kept = list_manifests(DirectoryStorage(tmp_path), run_id)
    other = kept[index]
    assert other.step != published.step
    checkpoint = f"{tmp_path}/runs/{run_id}/checkpoints/step-{other.step:08d}"
    assert read_result(tmp_path, run_id, "step.txt") == str(published.step).encode()

    evaluate_flow(checkpoint, cluster=shared)
    assert read_result(tmp_path, run_id, "step.txt") == str(published.step).encode()
    assert (
        read_result(tmp_path, run_id, "step.txt", evaluated_step=other.step)
        == str(other.step).encode()
    )
    says = rf"evaluate_flow saved no step\.txt for step {published.step} of run {run_id} in "
    with pytest.raises(ObjectNotFoundError, match=f"{says}.*; its files are: none"):
        read_result(tmp_path, run_id, "step.txt", evaluated_step=published.step)
