"""How fast objects of a checkpoint go to a Ceph RADOS Gateway and come back, through our
storage and through plain boto3."""

import io
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.s3.client import connect
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.benchmarks.beside import Times, rounds, show
from tests.support.ceph_server import CephServer, run_ceph

pytestmark = pytest.mark.timeout(1800)
ROUNDS = rounds(9)
SIZES = {"35 kB": 35_000, "16 MB": 16 * 10**6, "105 MB": 105 * 10**6}
REPEATS = {"35 kB": 50}
"""Of a small object many in a row count as one measurement."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CephServer]:
    """Run one that keeps its objects on the disk, as people's do."""
    with run_ceph(
        tmp_path_factory.mktemp("ceph"), store="bluestore", room_bytes=16 * 2**30
    ) as server:
        yield server


class Cpu:
    """Seconds that the call took, and processor seconds of this process beside them."""

    def __init__(self) -> None:
        """Start empty."""
        self.times, self.cpu = Times(), Times()

    def note(self, name: str, work: Callable[[], object], repeats: int) -> None:
        """Measure once."""
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            work()
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        self.times.note(name, lambda: seconds / repeats)
        self.cpu.note(name, lambda: cpu_s / repeats)


def test_objects(server: CephServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Print the table: medians over interleaved rounds; ours also hashes what it writes and
    checks what it reads."""
    storage = server.storage("bench")
    client = connect(storage)
    measured = Cpu()
    for _ in range(ROUNDS):
        for size, num_bytes in SIZES.items():
            data = os.urandom(num_bytes)
            for name, work in _ways(storage, client, data):
                measured.note(f"{size}: {name}", work, REPEATS.get(size, 1))
    rows = []
    for name in measured.times.seen:
        size, _, what = name.partition(": ")
        writes = any(word in what for word in ("write", "put", "upload"))
        reference = f"{size}: boto3 {'put_object' if writes else 'get_object'}"
        median_ms = measured.times.median_ms(name)
        rate = SIZES[size] / median_ms / 1000
        share = median_ms / measured.times.median_ms(reference)
        rows.append(
            (
                name,
                f"{median_ms:.1f}",
                f"{rate:.0f}",
                f"{measured.cpu.median_ms(name):.1f}",
                f"{share:.2f}",
            )
        )
    show(
        capsys,
        ("what", "median ms", "MB/s", "client's CPU ms", "times boto3's single request"),
        rows,
    )


def _ways(
    storage: S3Storage, client: Any, data: bytes
) -> Iterator[tuple[str, Callable[[], object]]]:
    where = {"Bucket": storage.bucket, "Key": storage.name_of("plain")}
    yield "our write", partial(storage.write, "ours", data)
    yield "boto3 put_object", partial(client.put_object, **where, Body=data)
    yield (
        "boto3 upload_fileobj",
        lambda: client.upload_fileobj(io.BytesIO(data), where["Bucket"], where["Key"]),
    )
    yield "our read", partial(storage.read, "ours")
    yield "boto3 get_object", partial(_get, client, where)
    yield (
        "boto3 download_fileobj",
        lambda: client.download_fileobj(where["Bucket"], where["Key"], io.BytesIO()),
    )


def _get(client: Any, where: dict[str, str]) -> bytes:
    content: bytes = client.get_object(**where)["Body"].read()
    return content


def test_whole_checkpoint(
    server: CephServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Print how long a checkpoint of 105 MB takes until it is on record and until it is
    restored, beside torch.save and boto3."""
    measured = Cpu()
    for number in range(ROUNDS):
        for name, storage in (
            ("to Ceph", server.storage(f"checkpoint/{number}")),
            ("to a directory", tmp_path / str(number)),
        ):
            model = torch.nn.Linear(3600, 7291, bias=False)
            policy = CheckpointParams(every_s=None)
            with RankContext.local(storage=storage, checkpoint=policy) as ctx:
                ctx.track(model=model)
                measured.note(f"ours, {name}: until on record", partial(_save, ctx), 1)
            with RankContext.local(storage=storage, checkpoint=policy) as ctx:
                measured.note(f"ours, {name}: restored", partial(ctx.track, model=model), 1)
        client = connect(server.storage("plain"))
        measured.note("torch.save and upload_fileobj", partial(_save_plainly, client, model), 1)
        measured.note("get_object and torch.load", partial(_load_plainly, client, model), 1)
    rows = [
        (name, f"{measured.times.median_ms(name):.0f}", f"{measured.cpu.median_ms(name):.0f}")
        for name in measured.times.seen
    ]
    show(capsys, ("what", "median ms", "client's CPU ms"), rows)


def _save(ctx: RankContext) -> None:
    ctx.checkpoint(force=True)
    ctx._parts.tracker._checkpointer.wait()  # type: ignore[union-attr]


def _save_plainly(client: Any, model: torch.nn.Module) -> None:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    client.upload_fileobj(buffer, "bucket", "plain/model.pt")


def _load_plainly(client: Any, model: torch.nn.Module) -> None:
    content = client.get_object(Bucket="bucket", Key="plain/model.pt")["Body"].read()
    model.load_state_dict(torch.load(io.BytesIO(content), weights_only=True))
