"""How fast a RankLoader is beside torch's DataLoader with a DistributedSampler; what an epoch
of ten million samples takes."""

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
from tests.benchmarks.beside import in_fresh_processes, rounds, show
from tests.benchmarks.photos import photo

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


class Batches(Rows):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return list(self._rows[torch.tensor(indices) % 4096])


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

    def __getitem__(self, index: int) -> torch.Tensor:
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

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._augment(Image.open(io.BytesIO(self._files[index % 64])).convert("RGB"))


def in_a_tensor(num_samples: int) -> TensorDataset:
    """Return as many rows of 1 kB, with their targets, as README's workload has them."""
    return TensorDataset(torch.randn(num_samples, 256), torch.zeros(num_samples))


KINDS: dict[str, tuple[Callable[[int], Dataset[Any]], int, int]] = {
    "rows of 1 kB": (Rows, 60_000, 0),
    "rows of 1 kB, by the batch": (Batches, 60_000, 0),
    "rows of 1 kB, a TensorDataset": (in_a_tensor, 60_000, 0),
    "rows of 1 kB, 2 workers": (Rows, 40_000, 2),
    "rows of 1 kB, by the batch, 2 workers": (Batches, 40_000, 2),
    "augmented tensors": (Images, 2_000, 0),
    "augmented tensors, 2 workers": (Images, 3_000, 2),
    "photos": (Photos, 400, 0),
    "photos, 2 workers": (Photos, 1_000, 2),
}


def epochs_of(
    loader: DataLoader[Any], sampler: "DistributedSampler[Any]"
) -> Callable[[int], Iterable[Any]]:
    """Return what gives an epoch's batches of torch's own loader."""

    def epoch(number: int) -> Iterable[Any]:
        sampler.set_epoch(number)
        return loader

    return epoch


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
    return num_samples / (time.perf_counter() - began_s), num_samples / (
        processor_s() - began_processor_s
    )


@pytest.mark.parametrize("kind", KINDS)
def test_throughput(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Print rank 0's samples per second of two, epoch about epoch."""
    make, num_samples, num_workers = KINDS[kind]
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    dataset = make(num_samples)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=WORLD_SIZE, rank=0)
    theirs = DataLoader(dataset, batch_size=LOCAL_BATCH, sampler=sampler, **options)
    ours = RankLoader(
        dataset,
        global_batch_size=LOCAL_BATCH * WORLD_SIZE,
        rank=0,
        world_size=WORLD_SIZE,
        **options,
    )
    ways = {
        REFERENCE: epochs_of(theirs, sampler),
        OURS: lambda number: (batch for batch, _ in ours.lockstep(number)),
    }
    if num_workers:
        options["seed_samples"] = "torch" if isinstance(dataset, Images | Photos) else False
        bare = RankLoader(
            dataset,
            global_batch_size=LOCAL_BATCH * WORLD_SIZE,
            rank=0,
            world_size=WORLD_SIZE,
            **options,
        )
        ways[f"{OURS}, seed_samples={options['seed_samples']!r}"] = lambda number: (
            batch for batch, _ in bare.lockstep(number)
        )
    paces: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            paces[name].append(pace(partial(ways[name], number)))
    rows = []
    for name, seen in paces.items():
        pairs = list(zip(seen[1:], paces[REFERENCE][1:], strict=True))
        ratios, of_processor = (
            [mine[i] / reference[i] for mine, reference in pairs] for i in range(2)
        )
        spread = statistics.quantiles(ratios, n=4)
        cells = (
            f"{statistics.median(ratios):.3f}",
            f"{spread[0]:.3f} to {spread[2]:.3f}",
            f"{statistics.median(of_processor):.3f}",
        )
        rows.append(
            (f"{kind}: {name}", f"{statistics.median(pace for pace, _ in seen[1:]):.0f}", *cells)
        )
    show(
        capsys,
        (
            "what",
            "samples/s: median",
            "times DataLoader's",
            "middle half of the rounds",
            "by processor time",
        ),
        rows,
    )


TEN_MILLION = r"""
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from prefect_torch_ddp.data.loader import RankLoader

class Many(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000_000
    def __getitem__(self, index):
        return index

def first():
    if sys.argv[1] == "ours":
        loader = RankLoader(Many(), global_batch_size=512, rank=0, world_size=2)
        return next(loader.lockstep(1))
    sampler = DistributedSampler(Many(), num_replicas=2, rank=0)
    return next(iter(DataLoader(Many(), batch_size=256, sampler=sampler)))

torch.randperm(1000)
begin_the_peak_anew()
before, began = memory_mb("VmRSS"), time.perf_counter()
kept = first()
print(time.perf_counter() - began, memory_mb() - before)
"""


def test_ten_million_samples(capsys: pytest.CaptureFixture[str]) -> None:
    """Print how long the first batch of an epoch of ten million samples takes, and its peak of
    memory, in a fresh process."""
    rows = []
    for name, argument in ((REFERENCE, "theirs"), (OURS, "ours")):
        seconds, megabytes = in_fresh_processes(TEN_MILLION, argument, num=ROUNDS)
        rows.append((name, f"{seconds * 1000:.0f}", f"{megabytes:.0f}"))
    show(capsys, ("what", "first batch after ms", "peak of memory MB"), rows)
