"""What version 0.1 stored is resumed, evaluated and read, on a directory and on S3; and what a
later version adds, or writes in a newer format, costs nothing.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

from prefect_torch_ddp import (
    ClusterParams,
    PrefectTorchDdpError,
    TrainParams,
    TrainReport,
    evaluate_flow,
    list_runs,
    read_goodput,
    read_ledger,
    read_metrics,
    train_flow,
)
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.formats import MORE, NEWER, rewrite

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("prefect_api")]

STORED = Path(__file__).parents[2] / "data" / "storage-0.1"
(RUN_ID,) = (path.name for path in (STORED / "runs").iterdir())
RUN = f"runs/{RUN_ID}"
NEWEST = f"{RUN}/checkpoints/step-00000008/000001/manifest.json"
JSON_FILES = sorted(
    str(path.relative_to(STORED))
    for path in STORED.rglob("*")
    if path.suffix in {".json", ".jsonl"} or path.name in {"000001", "ended"}
    if path.is_file()
)


def copy_to(storage: Storage) -> Storage:
    """Copy the whole storage."""
    for path in STORED.rglob("*"):
        if path.is_file():
            storage.write(str(path.relative_to(STORED)), path.read_bytes())
    return storage


@pytest.fixture
def copied(tmp_path: Path) -> DirectoryStorage:
    """Give a copy in a directory."""
    shutil.copytree(STORED, tmp_path / "store")
    return DirectoryStorage(tmp_path / "store")


def resume(storage: str, cluster: LocalCluster, **access: Any) -> TrainReport:
    """Continue the stored training for another epoch, in a run of its own."""
    return train_flow(
        TrainParams(
            workload="tests.data.points",
            storage=storage,
            world_size=2,
            options={"epochs": 3},
            resume_from=RUN_ID,
            retries=0,
            max_restarts=0,
            cluster=ClusterParams(address=cluster.scheduler_address),
            **access,
        )
    )


def check_reading(storage: Storage) -> None:
    """Read all that is kept of the run."""
    metrics = read_metrics(storage, RUN_ID)
    assert sorted(metrics["step"].unique()) == list(range(1, 9))
    assert str(read_ledger(storage, RUN_ID)).splitlines()[0] == "epoch 1: 24 samples, each once"
    assert read_goodput(storage, RUN_ID).num_attempts == 1
    (row,) = list_runs(storage, "train-ddp/tests.data.points").to_dict("records")
    assert (row["run_id"], row["state"], row["steps"]) == (RUN_ID, "completed", 8)
    assert 0 <= row["accuracy"] <= 1


def test_a_directory_of_version_0_1(copied: DirectoryStorage, dask_cluster: LocalCluster) -> None:
    """Its metrics, ledger, times and record are read, its checkpoint is evaluated, and a new run
    continues from it."""
    check_reading(copied)
    cluster = ClusterParams(address=dask_cluster.scheduler_address)
    evaluation = evaluate_flow(f"{copied.uri}/{RUN}", cluster=cluster)
    row = list_runs(copied).iloc[0]
    assert (evaluation.num_samples, evaluation.accuracy) == (8, row["accuracy"])
    report = resume(copied.uri, dask_cluster)
    assert (report.training.resumed_from_step, report.training.num_steps) == (8, 12)


def test_a_bucket_of_version_0_1(s3_server: Any) -> None:
    """The same files in a bucket are read in the same way, and its checkpoints are whole."""
    from prefect_torch_ddp.checkpoint.manifest import list_manifests
    from prefect_torch_ddp.checkpoint.restore import Restorer

    storage = copy_to(s3_server.storage("stored"))
    check_reading(storage)
    manifests = list_manifests(storage, RUN_ID)
    assert [found.step for found in manifests] == [6, 8]
    for manifest in manifests:
        restorer = Restorer(storage, manifest)
        assert all(restorer.generators(rank) is not None for rank in (0, 1))


def change(storage: DirectoryStorage, key: str, changes: dict[str, Any]) -> None:
    """Change a file, or the first line of one, as another version would have written it."""
    if not key.endswith(".jsonl"):
        rewrite(storage, key, changes)
        return
    first, _, rest = storage.read(key).partition(b"\n")
    storage.write(key, json.dumps({**json.loads(first), **changes}).encode() + b"\n" + rest)


def test_unknown_fields_in_every_file_are_ignored(
    copied: DirectoryStorage, dask_cluster: LocalCluster
) -> None:
    """Reading and resuming are as before, and no checkpoint is deleted."""
    for key in JSON_FILES:
        change(copied, key, MORE)
    check_reading(copied)
    report = resume(copied.uri, dask_cluster)
    assert report.training.resumed_from_step == 8
    assert (copied.root / NEWEST).exists()


def test_a_newer_manifest_is_refused_by_name_and_stays(
    copied: DirectoryStorage, dask_cluster: LocalCluster
) -> None:
    """It is not passed over for an older checkpoint, and nothing is deleted."""
    change(copied, NEWEST, NEWER)
    before = sorted(path for path in copied.root.rglob("*") if "checkpoints" in path.parts)
    with pytest.raises(PrefectTorchDdpError, match=r"step-00000008.*format 7.*Install 9.1.0"):
        resume(copied.uri, dask_cluster)
    after = sorted(path for path in copied.root.rglob("*") if "checkpoints" in path.parts)
    assert set(before) <= set(after)
