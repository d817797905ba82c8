"""A flow whose prepare packs shards, which ranks read in place: in a directory and a bucket,
through a kill, to the same bits."""

from collections import Counter
from pathlib import Path

import pytest

from prefect_torch_ddp import CheckpointParams, TrainParams, train_flow
from tests.integration.image_files import image_files, write_folder, write_objects
from tests.integration.s3_server import S3Server, s3_server  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_api")]


def test_shards_are_read_in_place_and_each_sample_once(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bucket, with a rank killed at step 9, the ledger is clean and the weights are those
    of a directory's run."""
    for name, value in zip(
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), s3_server.keys["owner"], strict=True
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint_url)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    common = {
        "workload": "tests.workloads.packed",
        "ledger": True,
        "checkpoint": CheckpointParams(every_steps=4),
    }
    fault = {"how": "SIGKILL", "step": 9, "rank": 1, "attempts": [1]}
    bucket = f"s3://{s3_server.bucket}"
    write_objects(s3_server.storage("raw"), image_files(40))
    write_folder(tmp_path / "raw", image_files(40))
    killed = train_flow(
        TrainParams(
            source=f"{bucket}/raw", storage=f"{bucket}/runs", options={"fault": fault}, **common
        )
    )
    plain = train_flow(
        TrainParams(source=str(tmp_path / "raw"), storage=str(tmp_path / "store"), **common)
    )
    per_class = Counter(name.partition("/")[0] for name in image_files(40))
    for report in (killed, plain):
        assert report.ledger is not None
        assert report.ledger.is_clean, str(report.ledger)
        assert [epoch.num_samples for epoch in report.epochs] == [40, 40]
        assert {score.name: score.support for score in report.evaluation.classes} == per_class
        assert report.dataset.num_files > 2
    assert killed.training.attempt == 2
    assert killed.training.resumed_from_step in (4, 8)
    model = s3_server.storage("").read(str(killed.model_uri).removeprefix(f"{bucket}/"))
    assert model == Path(str(plain.model_uri)).read_bytes()
    assert not (tmp_path / "cache/prefect-torch-ddp").exists(), "a rank copied the dataset"
