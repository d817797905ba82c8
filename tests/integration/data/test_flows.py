"""Flows get the same result from images in a bucket and in a folder, plain or packed."""

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from prefect_torch_ddp import (
    ClusterParams,
    TrainParams,
    read_ledger,
    train_flow,
)
from prefect_torch_ddp.blocks import fingerprint_of, resolve_source
from prefect_torch_ddp.tasks.workload import dataset_id, read_workload
from tests.integration.tasks.test_s3_storage_flow import all_that_was_recorded
from tests.support.blocks import save_block
from tests.support.runs import flow_run_id_of, logs_of
from tests.support.s3_server import S3Server

pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("prefect_api"),
]

NUM = 50


def images() -> dict[str, bytes]:
    """Make red and blue images, and what isn't one."""
    made = {"notes.txt": b"no class", "blue/notes.txt": b"no image"}
    for i in range(NUM):
        data = BytesIO()
        colour = (200 + i, 0, i) if i % 2 else (i, 0, 200 + i)
        Image.new("RGB", (16, 16), colour).save(data, "PNG")
        made[f"{'red' if i % 2 else 'blue'}/{i:03}.png"] = data.getvalue()
    return made


@pytest.mark.long
def test_the_same_workload_trains_on_a_bucket_and_on_a_folder(
    s3_server: S3Server, shared: ClusterParams, tmp_path: Path
) -> None:
    """A bucket from a block gives the folder's bits, and the dataset's name follows its listing."""
    _, secret = s3_server.keys["owner"]
    block = save_block("raw-images", s3_server, folder="raw-images")
    bucket, folder = s3_server.storage("raw-images"), tmp_path / "images"
    for name, data in images().items():
        bucket.write(name, data)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    common = {
        "workload": "tests.workloads.data:Indexed",
        "storage": str(tmp_path / "store"),
        "ledger": True,
        "cluster": shared,
    }
    on_folder = train_flow(TrainParams(**common, source=str(folder)))
    on_bucket = train_flow(TrainParams(**common, source=block))

    assert on_bucket.evaluation.accuracy == 1.0
    assert on_bucket.training.value == on_folder.training.value
    assert on_bucket.dataset.dataset_id != on_folder.dataset.dataset_id
    assert read_ledger(tmp_path / "store", on_bucket.run_id).is_clean
    for report, kind in ((on_bucket, "S3ImageFolder"), (on_folder, "ImageFolder")):
        lines = [line.message for line in logs_of(flow_run_id_of(report.flow_run_url))]
        assert any(f"reads a {kind} of {NUM} images" in line for line in lines)
    assert secret not in all_that_was_recorded(flow_run_id_of(on_bucket.flow_run_url))

    workload = read_workload("tests.workloads.data:Indexed")

    def dataset_now() -> str:
        return dataset_id(workload, {}, fingerprint_of(resolve_source(block)))

    assert dataset_now() == on_bucket.dataset.dataset_id
    bucket.delete("red/001.png")
    assert dataset_now() != on_bucket.dataset.dataset_id
