"""A training of train_flow that was broken off goes on by every way there is, and ends with the
bits of an undisturbed one.

By a restart within the task: test_restarts.py; by a retry of the task: test_train_flow.py.
"""

from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import CheckpointParams, RankFailedError, TrainParams, train_flow
from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.runs import logs_of, retry_train_flow

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("prefect_api")]

KILLED = {"how": "SIGKILL", "step": 12, "rank": 1, "attempts": [1]}


def params(store: Path, **changes: Any) -> TrainParams:
    """Return parameters of the tiny workload, with a checkpoint every five steps, and no second
    attempt."""
    given: dict[str, Any] = {
        "workload": "tests.workloads.tiny",
        "storage": str(store),
        "seed": 3,
        "retries": 0,
        "max_restarts": 0,
    }
    return TrainParams(**{**given, **changes}, checkpoint=CheckpointParams(every_steps=5))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Keep the weights of a training that nothing happened to, once a test has made it."""
    return {}


def weights_of_undisturbed(kept: dict[str, bytes], folder: Path) -> bytes:
    """Return them; the first one who asks trains."""
    if not kept:
        kept["weights"] = weights(train_flow(params(folder / "undisturbed")))
    return kept["weights"]


def weights(report: Any) -> bytes:
    """Return the exported model."""
    assert report.model_uri is not None
    return Path(report.model_uri).read_bytes()


def test_a_flow_retry_resumes(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """The task has no retry left and fails; the flow's own retry resumes from its
    checkpoint."""
    report = train_flow.with_options(retries=1)(
        params(tmp_path / "store", options={"fault": KILLED})
    )
    assert report.training.attempt == 2
    assert report.training.resumed_from_step in (5, 10)
    assert weights(report) == weights_of_undisturbed(undisturbed, tmp_path)


def test_a_failed_run_is_gone_on_with(
    prefect_api: str, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """By a new run with resume_from, its id or its place, and by `prefect flow-run retry` in
    another process."""
    store = tmp_path / "store"
    with pytest.raises(RankFailedError, match="SIGKILL"):
        train_flow(params(store, options={"fault": KILLED}))
    (failed,) = (path.name for path in (store / "runs").iterdir())
    expected = weights_of_undisturbed(undisturbed, tmp_path)
    for reference, where in ((failed, store), (f"{store}/runs/{failed}", tmp_path / "elsewhere")):
        report = train_flow(params(where, resume_from=reference))
        assert report.training.resumed_from_step in (5, 10)
        assert (report.training.attempt, report.run_id != failed) == (1, True)
        assert weights(report) == expected
    flow_run_id = retry_train_flow(prefect_api, failed, tmp_path / "home")
    assert newest_attempt(DirectoryStorage(store), failed) == 2
    assert any(
        f"resuming from the checkpoint of step {step} of run {failed}" in line.message
        for line in logs_of(flow_run_id)
        for step in (5, 10)
    )
    assert (store / "runs" / failed / "model" / "model.safetensors").read_bytes() == expected
