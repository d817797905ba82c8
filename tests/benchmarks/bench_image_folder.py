"""How fast images in a bucket are read, compared with a local disk: a static file server and
Ceph, 0 and 20 ms away; how much processor time a GET takes. PTD_BENCH_ROUNDS and
PTD_BENCH_IMAGES make it shorter or longer. The dataset, its client, its loader processes
and its cache are new in each round."""

import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional

from prefect_torch_ddp.data import S3ImageFolder
from prefect_torch_ddp.data.images.listing import write_index
from prefect_torch_ddp.data.lookahead import LookAhead
from prefect_torch_ddp.storage.protocol import ObjectPart
from prefect_torch_ddp.storage.s3.client import connect
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.benchmarks.beside import rounds, show
from tests.benchmarks.image_servers import (
    SECRETS_OF_NOBODY,
    Server,
    nginx_etag,
    proxy,
    run_filled_ceph,
    run_nginx,
    write_photos,
)

pytestmark = pytest.mark.timeout(7200)
ROUNDS = rounds(5)
NUM_IMAGES = int(os.environ.get("PTD_BENCH_IMAGES", "1500"))
NUM_WORKERS, BATCH = 2, 64
LOCAL = "ImageFolder, local disk"


def to_tensor(image: Image.Image) -> Any:
    """Resize, as a training would."""
    return functional.to_tensor(functional.resize(image, [224, 224]))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make photos of about 35 kB, in a folder as a bucket has it."""
    bucket = tmp_path_factory.mktemp("served") / "bucket"
    write_photos(bucket / "images", NUM_IMAGES)
    return bucket


@pytest.fixture(scope="module", params=[run_nginx, run_filled_ceph])
def server(
    request: pytest.FixtureRequest, served: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Serve all of it."""
    with request.param(served, tmp_path_factory.mktemp("s")) as running:
        yield running


def cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def two_epochs(dataset: Dataset[Any]) -> list[tuple[float, float]]:
    """Read it twice in random order; return seconds and processor seconds of each epoch."""
    measured = []
    for _ in range(2):
        began, began_cpu = time.perf_counter(), cpu_s()
        sampler: Any = BatchSampler(RandomSampler(dataset), BATCH, drop_last=False)  # type: ignore[arg-type]
        if isinstance(dataset, S3ImageFolder):
            sampler = LookAhead(sampler, NUM_WORKERS)
        workers: Any = {"num_workers": NUM_WORKERS, "multiprocessing_context": "fork"}
        loader = DataLoader(dataset, batch_sampler=sampler, **workers)
        assert sum(len(batch[0]) for batch in loader) == NUM_IMAGES
        measured.append((time.perf_counter() - began, cpu_s() - began_cpu))
    return measured


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_epochs(server: Server, delay_s: float, served: Path, tmp_path: Path) -> None:
    """Print each way's epochs in units of the local disk's in the same round, and their CPU."""
    write_index(server.listed("images"), tmp_path)
    with proxy(server.port, delay_s) as url:

        def storage(prefix: str) -> Any:
            keys: Any = {"access_key_id": server.key, "secret_access_key": server.secret}
            return S3Storage("bucket", prefix, endpoint_url=url, region="us-east-1", **keys)

        def ours(**options: Any) -> Dataset[Any]:
            return S3ImageFolder(storage("images"), to_tensor, index=tmp_path, **options)

        ways: dict[str, Callable[[], Dataset[Any]]] = {
            LOCAL: lambda: ImageFolder(served / "images", to_tensor),
            "S3ImageFolder": ours,
            "S3ImageFolder, cache": lambda: ours(cache=tmp_path / "cache"),
        }
        seen: dict[str, list[list[float]]] = {name: [] for name in ways}
        for number in range(ROUNDS):
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
            found = {name: two_epochs(ways[name]()) for name in list(ways)[:: (-1) ** number]}
            unit = found[LOCAL]
            for name, epochs in found.items():
                pairs = list(zip(epochs, unit, strict=True))
                times = [seconds / its for (seconds, _), (its, _) in pairs]
                beyond = [1000 * (cpu - its) / NUM_IMAGES for (_, cpu), (_, its) in pairs]
                seen[name].append(times + beyond)
    cpu = "CPU beyond local, ms an image: first"
    where = f"{server.name}, +{1000 * delay_s:.0f} ms"
    rows = [(name, *map(spread, zip(*each, strict=True))) for name, each in seen.items()]
    show(f"{where} | first epoch, times local disk | second | {cpu} | second", rows)


def spread(values: tuple[float, ...]) -> str:
    """Return the middle one, the smallest and the largest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


NUM_GETS, NUM_BYTES, AT_ONCE = 500, 35_000, 32
GET_ROUNDS = rounds(15)


def test_cpu_of_a_get(tmp_path: Path) -> None:
    """Print milliseconds of this process's threads together, per GET from a static server, many
    side by side and boto3's; medians over interleaved rounds."""
    bucket, home = tmp_path / "b" / "bucket", tmp_path / "home"
    bucket.mkdir(parents=True)
    home.mkdir()
    parts = [_written(bucket / f"{i:05d}.jpg") for i in range(NUM_GETS)]
    key, secret = SECRETS_OF_NOBODY
    with run_nginx(bucket, home) as server:
        keys: Any = {"access_key_id": key, "secret_access_key": secret}
        url = f"http://127.0.0.1:{server.port}"
        storage = S3Storage("bucket", endpoint_url=url, region="us-east-1", **keys)
        ways = {
            "boto3, one after the other": partial(_by_boto3, connect(storage)),
            f"read_many, {AT_ONCE} at once": partial(_by_us, storage),
        }
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(GET_ROUNDS + 1):
            for name, work in ways.items():
                began_cpu_s, began_s = time.process_time(), time.perf_counter()
                work(parts)
                took_s = time.process_time() - began_cpu_s, time.perf_counter() - began_s
                seen[name].append(took_s)
    rows = []
    for name, measured in seen.items():
        medians_s = map(statistics.median, zip(*measured[1:], strict=True))
        rows.append((name, *(f"{1000 * each_s / NUM_GETS:.2f}" for each_s in medians_s)))
    show("a GET of 35 kB | CPU ms | ms", rows)


def _written(path: Path) -> ObjectPart:
    path.write_bytes(os.urandom(NUM_BYTES))
    return ObjectPart(path.name, NUM_BYTES, None, nginx_etag(path))


def _by_boto3(client: Any, parts: list[ObjectPart]) -> None:
    for part in parts:
        assert len(client.get_object(Bucket="bucket", Key=part.key)["Body"].read()) == NUM_BYTES


def _by_us(storage: S3Storage, parts: list[ObjectPart]) -> None:
    for start in range(0, len(parts), AT_ONCE):
        assert all(
            isinstance(data, bytes) for data in storage.read_many(parts[start : start + AT_ONCE])
        )
