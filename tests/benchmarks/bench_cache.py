"""What the cache costs beside local files: reading 35 kB objects, alone and decoded; and a
shard read in order, by neighbours."""

import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from prefect_torch_ddp.data.images.cache import CachedReads
from prefect_torch_ddp.data.images.tar_shards import pack_shards
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import ObjectPart, ReadsMany
from tests.benchmarks.beside import rounds
from tests.benchmarks.photos import write_photos

pytestmark = pytest.mark.timeout(1800)
ROUNDS = rounds(11)
NUM_IMAGES, BATCH = 1000, 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write JPEGs of some 35 kB."""
    root = tmp_path_factory.mktemp("images")
    write_photos(root, NUM_IMAGES)
    return root


def parts_of(source: ReadsMany) -> list[list[ObjectPart]]:
    """Cut what a source lists into batches."""
    parts = [
        ObjectPart(found.key, found.num_bytes, etag=found.etag) for found in source.list_objects("")
    ]
    return [parts[first : first + BATCH] for first in range(0, len(parts), BATCH)]


def decode(data: object) -> None:
    """Do what a dataset does with an image."""
    assert isinstance(data, bytes)
    Image.open(io.BytesIO(data)).convert("RGB").resize((224, 224))


def cpu_ms(read: Callable[[], None]) -> float:
    """Return the processor time of an image, in ms."""
    begun = time.process_time()
    read()
    return 1000 * (time.process_time() - begun) / NUM_IMAGES


def through(source: ReadsMany) -> Callable[[], None]:
    """Return what reads and decodes all images of a source, batch by batch."""
    batches = parts_of(source)

    def read() -> None:
        for batch in batches:
            for data in source.read_many(batch):
                decode(data)

    return read


def of_files(folder: Path) -> Callable[[], None]:
    """Return what reads and decodes them as torchvision does."""
    paths = sorted(map(str, folder.rglob("*.jpg")))

    def read() -> None:
        for path in paths:
            with open(path, "rb") as file:  # noqa: PTH123 - a Path would cost more
                decode(file.read())

    return read


def test_reading_through_the_cache(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processor time of an image: a local file, the cache, shards in order and by chance; each
    decoded and resized."""
    local = DirectoryStorage(folder)
    ways = {
        "local files": of_files(folder),
        "cache": through(CachedReads(local, tmp_path / "cache")),
        "shards in order": through(pack_shards(local, tmp_path / "in_order")),
        "shards by chance": through(pack_shards(local, tmp_path / "shuffled", shuffle_seed=1)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):
        for name, read in ways.items():
            times[name].append(cpu_ms(read))
    unit = statistics.median(times["local files"][1:])
    with capsys.disabled():
        for name, all_ms in times.items():
            median = statistics.median(all_ms[1:])  # the first round fills the cache
            print(
                f"\n{name:20} {median:6.3f} ms CPU an image, {median / unit:5.3f} of local files",
                end="",
            )
