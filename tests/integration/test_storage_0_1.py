"""This version trains on, evaluates and reads a storage of version 0.1, in a directory and a
bucket."""

import json
from pathlib import Path
from typing import Literal

import pytest

from prefect_torch_ddp import (
    CheckpointParams,
    ClusterParams,
    Storage,
    TrainParams,
    TrainReport,
    evaluate_flow,
    list_runs,
    read_goodput,
    read_ledger,
    read_metrics,
    read_result,
    train_flow,
)
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.errors import NewerFormatError
from prefect_torch_ddp.records.run_record import read_run_record
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.blocks import save_block
from tests.support.formats import NEWER, rewrite, snapshot
from tests.support.s3_server import S3Server
from tests.support.storage_0_1 import FOLDER, RUN_ID, copied

pytestmark = [
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.timeout(300),  # two whole flows
]


def check_reading(storage: Storage) -> None:
    """Read everything that the run left."""
    metrics = read_metrics(storage, RUN_ID)
    assert metrics.step.tolist() == [step for step in range(1, 16) for _ in range(2)]
    assert read_ledger(storage, RUN_ID).is_clean
    assert read_goodput(storage, RUN_ID).num_attempts == 2
    assert json.loads(read_result(storage, RUN_ID, "notes.json")) == {"steps": 15}
    runs = list_runs(storage)
    assert runs.run_id.tolist() == [RUN_ID]
    assert runs.steps.tolist() == [15]


def resume(storage: str, cluster: ClusterParams) -> TrainReport:
    """Continue the training for another epoch, in a new run."""
    params = TrainParams(
        workload="tests.data.make_storage",
        storage=storage,
        cluster=cluster,
        world_size=2,
        seed=7,
        ledger=True,
        checkpoint=CheckpointParams(every_steps=4, every_s=None, keep_last=1),
        resume_from=RUN_ID,
        options={"epochs": 4},
    )
    return train_flow(params)


@pytest.mark.extended
@pytest.mark.parametrize("where", ["directory", "bucket"])
def test_it_is_read_resumed_and_evaluated(
    s3_server: S3Server,
    shared: ClusterParams,
    tmp_path: Path,
    where: Literal["directory", "bucket"],
) -> None:
    """A new run resumes, an old checkpoint is evaluated, and the old run stays as it was."""
    storage: Storage
    if where == "directory":
        storage = DirectoryStorage(copied(tmp_path / "storage"))
        named = block = storage.uri
    else:
        storage = s3_server.storage("kept")
        for key, data in snapshot(DirectoryStorage(FOLDER)).items():
            storage.write(key, data)
        block, named = save_block("kept", s3_server, folder="kept"), storage.uri
    before = snapshot(storage)
    check_reading(storage)

    was = read_run_record(storage, RUN_ID)
    at_12 = f"{named}/runs/{RUN_ID}/checkpoints/step-00000012/000002"
    for checkpoint in (at_12, f"{named}/runs/{RUN_ID}"):
        evaluation = evaluate_flow(checkpoint, block, shared)
        assert evaluation.num_samples == 21
    assert was.evaluation is not None
    assert evaluation.accuracy == was.evaluation.accuracy

    report = resume(block, shared)
    assert (report.training.resumed_from_step, report.training.num_steps) == (15, 20)
    assert [manifest.step for manifest in list_manifests(storage, report.run_id)] == [20]
    assert set(list_runs(storage).run_id) == {RUN_ID, report.run_id}
    after = snapshot(storage)
    kept = {key: data for key, data in before.items() if not key.startswith("run-records/")}
    assert kept.items() <= after.items()
    assert read_run_record(storage, RUN_ID).attempts == was.attempts
    for key in after.keys() - before.keys():
        if key.endswith((".json", ".jsonl", "/ended")) or "/attempts/" in key:
            first = after[key].splitlines()[0] if key.endswith(".jsonl") else after[key]
            is_of_user = "/results/" in key
            assert is_of_user or json.loads(first)["format"] == 1, key


def test_a_newer_checkpoint_ends_the_flow_by_name(shared: ClusterParams, tmp_path: Path) -> None:
    """The flow ends before anything starts, falls back to nothing and deletes nothing."""
    storage = DirectoryStorage(copied(tmp_path / "storage"))
    key = f"runs/{RUN_ID}/checkpoints/step-00000015/000002/manifest.json"
    rewrite(storage, key, NEWER)
    before = snapshot(storage)
    with pytest.raises(NewerFormatError, match=rf"{key} is .* of format 7, .* Install 9\.1\.0"):
        resume(storage.uri, shared)
    assert snapshot(storage) == before
