"""How fast images in a bucket are read, beside a local disk: a static file server and Ceph, 0
and 20 ms away.

PTD_BENCH_ROUNDS and PTD_BENCH_IMAGES make it shorter or longer. The dataset, its client, its
loader processes and its cache are new in each round.
"""

import os
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import functional

from prefect_torch_ddp.data import PackedObjects, S3ImageFolder
from prefect_torch_ddp.data.images.listing import write_index
from prefect_torch_ddp.data.images.tar_shards import pack_shards
from prefect_torch_ddp.data.lookahead import LookAhead
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.benchmarks.beside import rounds, show
from tests.benchmarks.image_servers import Server, proxy, run_filled_ceph, run_nginx
from tests.benchmarks.photos import write_photos

pytestmark = pytest.mark.timeout(7200)
ROUNDS = rounds(5)
NUM_IMAGES = int(os.environ.get("PTD_BENCH_IMAGES", "1500"))
NUM_WORKERS, BATCH, NUM_SHARDS = 2, 64, 8
LOCAL = "ImageFolder, local disk"


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Resize, as a training would."""
    return functional.to_tensor(functional.resize(image, [224, 224]))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make photos of about 35 kB and shards of them, in a folder as a bucket has it."""
    bucket = tmp_path_factory.mktemp("served") / "bucket"
    write_photos(bucket / "images", NUM_IMAGES)
    num_bytes = sum(path.stat().st_size + 2048 for path in (bucket / "images").rglob("*.jpg"))
    shard_bytes = num_bytes // NUM_SHARDS
    pack_shards(bucket / "images", bucket / "shards", shard_bytes=shard_bytes, shuffle_seed=0)
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
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=NUM_WORKERS,
            multiprocessing_context="fork",
        )
        assert sum(len(batch[0]) for batch in loader) == NUM_IMAGES
        measured.append((time.perf_counter() - began, cpu_s() - began_cpu))
    return measured


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_epochs(
    server: Server,
    delay_s: float,
    served: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Print each way's epochs in units of the local disk's in the same round, and their CPU."""
    write_index(server.listed("images"), tmp_path)
    with proxy(server.port, delay_s) as url:

        def storage(prefix: str) -> Any:
            keys = {"access_key_id": server.key, "secret_access_key": server.secret}
            return S3Storage("bucket", prefix, endpoint_url=url, region="us-east-1", **keys)

        def ours(**options: Any) -> Dataset[Any]:
            return S3ImageFolder(storage("images"), to_tensor, index=tmp_path, **options)

        ways: dict[str, Callable[[], Dataset[Any]]] = {
            LOCAL: lambda: ImageFolder(served / "images", to_tensor),
            "S3ImageFolder": ours,
            "S3ImageFolder, cache": lambda: ours(cache=tmp_path / "cache"),
            "S3ImageFolder, shards": lambda: S3ImageFolder(
                PackedObjects(storage("shards")), to_tensor
            ),
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
    head = (where, "first epoch, times local disk", "second", cpu, "second")
    rows = [(name, *map(spread, zip(*each, strict=True))) for name, each in seen.items()]
    show(capsys, head, rows)


def spread(values: tuple[float, ...]) -> str:
    """Return the middle one, the smallest and the largest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
