"""How fast a RankLoader is, compared with torch's DataLoader with a DistributedSampler."""

import io
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchvision.transforms import v2

from prefect_torch_ddp.data.loader import RankLoader
from tests.benchmarks.beside import median_and_half, rounds, show
from tests.benchmarks.image_servers import photo

pytestmark = pytest.mark.timeout(1800)
ROUNDS = rounds(11)
LOCAL_BATCH = 64
WORLD_SIZE = 2
REFERENCE, OURS = "DataLoader, DistributedSampler", "RankLoader"


class Rows(Dataset[torch.Tensor]):
    """Rows of features that are in memory: the least that a sample can cost."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._rows = torch.randn(4096, 256)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index % 4096]


class Images(Dataset[torch.Tensor]):
    """Images of 96 times 96, decoded already, augmented by a random crop and flip, at a random
    angle."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._images = torch.randint(0, 256, (64, 3, 96, 96), dtype=torch.uint8)
        flips = [
            v2.RandomResizedCrop(64, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomRotation(10),
        ]
        self._augment = v2.Compose([*flips, v2.ToDtype(torch.float32, scale=True)])

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        return self._augment(self._images[index % 64])


class Photos(Dataset[torch.Tensor]):
    """Photos of 500 times 375 in memory, as JPEG of some 35 kB: decoded, cropped and flipped by
    chance, as for ImageNet."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        generator = np.random.default_rng(0)
        self._files = [photo(generator) for _ in range(64)]
        crop = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
        self._augment = v2.Compose([*crop, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        return self._augment(Image.open(io.BytesIO(self._files[index % 64])).convert("RGB"))


def in_a_tensor(num_samples: int) -> TensorDataset:
    """Return as many rows of 1 kB, with their targets, as README's workload has them."""
    return TensorDataset(torch.randn(num_samples, 256), torch.zeros(num_samples))


KINDS: dict[str, tuple[Callable[[int], Dataset[Any]], int, int]] = {
    "rows of 1 kB": (Rows, 60_000, 0),
    "rows of 1 kB, a TensorDataset": (in_a_tensor, 60_000, 0),
    "rows of 1 kB, 2 workers": (Rows, 40_000, 2),
    "augmented tensors, 2 workers": (Images, 3_000, 2),
    "photos, 2 workers": (Photos, 1_000, 2),
}


def processor_s() -> float:
    """Return the processor time that this process has taken, and its workers."""
    children = (child.cpu_times() for child in psutil.Process().children())
    return time.process_time() + sum(times.user + times.system for times in children)


def pace(batches: Callable[[], Iterable[torch.Tensor | list[torch.Tensor]]]) -> tuple[float, float]:
    """Return samples per second over an epoch, and per second of processor time.

    Making the order counts; starting workers doesn't, as they are there already.
    """
    began_s, began_processor_s = time.perf_counter(), processor_s()
    num_samples = sum(len(batch[0] if isinstance(batch, list) else batch) for batch in batches())
    passed_s, processed_s = time.perf_counter() - began_s, processor_s() - began_processor_s
    return num_samples / passed_s, num_samples / processed_s


@pytest.mark.parametrize("kind", KINDS)
def test_throughput(kind: str) -> None:
    """Print rank 0's samples per second of two, epoch about epoch."""
    make, num_samples, num_workers = KINDS[kind]
    of_workers: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    dataset = make(num_samples)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=WORLD_SIZE, rank=0)
    theirs = DataLoader(dataset, batch_size=LOCAL_BATCH, sampler=sampler, **of_workers)

    def epoch_of_theirs(number: int) -> Iterable[Any]:
        sampler.set_epoch(number)
        return theirs

    def ours(**more: Any) -> Callable[[int], Iterable[Any]]:
        options = {"rank": 0, "world_size": WORLD_SIZE, **of_workers, **more}
        loader = RankLoader(dataset, global_batch_size=LOCAL_BATCH * WORLD_SIZE, **options)
        return lambda number: (batch for batch, _ in loader.lockstep(number))

    ways = {REFERENCE: epoch_of_theirs, OURS: ours()}
    if num_workers:
        seeds = "torch" if isinstance(dataset, Images | Photos) else False
        ways[f"{OURS}, seed_samples={seeds!r}"] = ours(seed_samples=seeds)
    paces: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            paces[name].append(pace(partial(ways[name], number)))
    rows = []
    for name, seen in paces.items():
        pairs = list(zip(seen[1:], paces[REFERENCE][1:], strict=True))
        ratios, of_processor = ([mine[i] / its[i] for mine, its in pairs] for i in range(2))
        of_wall_s = f"{statistics.median(pace for pace, _ in seen[1:]):.0f}"
        by_processor_s = f"{statistics.median(of_processor):.3f}"
        rows.append((f"{kind}: {name}", of_wall_s, *median_and_half(ratios), by_processor_s))
    times = "times DataLoader's | middle half of the rounds | by processor time"
    show(f"what | samples/s: median | {times}", rows)
