"""How much processor time a GET of a small object takes, many side by side and boto3's beside
them, of a static server."""

import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp.storage.protocol import ObjectPart
from prefect_torch_ddp.storage.s3.client import connect
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.benchmarks.beside import rounds, show
from tests.benchmarks.image_servers import SECRETS_OF_NOBODY, nginx_etag, run_nginx

pytestmark = pytest.mark.timeout(600)
ROUNDS = rounds(15)
NUM_OBJECTS, NUM_BYTES, BATCH = 500, 35_000, 32


def test_cpu_of_a_get(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Print milliseconds of this process's threads together, per GET; medians over interleaved
    rounds."""
    bucket, home = tmp_path / "b" / "bucket", tmp_path / "home"
    bucket.mkdir(parents=True)
    home.mkdir()
    parts = [_written(bucket / f"{i:05d}.jpg") for i in range(NUM_OBJECTS)]
    key, secret = SECRETS_OF_NOBODY
    with run_nginx(bucket, home) as server:
        url = f"http://127.0.0.1:{server.port}"
        storage = S3Storage(
            "bucket",
            endpoint_url=url,
            region="us-east-1",
            access_key_id=key,
            secret_access_key=secret,
        )
        ways = {
            "boto3, one after the other": partial(_by_boto3, connect(storage)),
            "read_many, 32 at once": partial(_by_us, storage),
        }
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, work in ways.items():
                began_cpu_s, began_s = time.process_time(), time.perf_counter()
                work(parts)
                seen[name].append(
                    (time.process_time() - began_cpu_s, time.perf_counter() - began_s)
                )
    rows = []
    for name, measured in seen.items():
        cpu_s, wall_s = (statistics.median(column) for column in zip(*measured[1:], strict=True))
        rows.append(
            (name, f"{1000 * cpu_s / NUM_OBJECTS:.2f}", f"{1000 * wall_s / NUM_OBJECTS:.2f}")
        )
    show(capsys, ("a GET of 35 kB", "CPU ms", "ms"), rows)


def _written(path: Path) -> ObjectPart:
    path.write_bytes(os.urandom(NUM_BYTES))
    return ObjectPart(path.name, NUM_BYTES, None, nginx_etag(path))


def _by_boto3(client: Any, parts: list[ObjectPart]) -> None:
    for part in parts:
        assert len(client.get_object(Bucket="bucket", Key=part.key)["Body"].read()) == NUM_BYTES


def _by_us(storage: S3Storage, parts: list[ObjectPart]) -> None:
    for start in range(0, len(parts), BATCH):
        assert all(
            isinstance(data, bytes) for data in storage.read_many(parts[start : start + BATCH])
        )
