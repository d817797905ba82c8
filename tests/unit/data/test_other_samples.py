"""A training that resumes in the middle of an epoch of other samples, as many as before."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from prefect_torch_ddp import RankContext, read_ledger
from prefect_torch_ddp.data import S3ImageFolder, image_folder, table
from tests.unit.data.tables.parquet_files import numbered

WARNING = "from the middle of an epoch of 16 samples"


class KilledError(Exception):
    """Ends a training in the middle of an epoch."""


class Doubled(Dataset[Any]):
    """Another dataset's samples, as a transform makes them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def train(folder: Path, dataset: Any, dies_at: int | None = None) -> int:
    """Train an epoch of four steps; return the number of steps made."""
    num_steps = 0
    saves = {"every_steps": 1, "every_s": None}
    with RankContext.local(storage=folder / "storage", checkpoint=saves, ledger=True) as ctx:
        model = torch.nn.Linear(1, 1)
        ctx.track(model=model)
        for _ in ctx.steps(ctx.loader(dataset, global_batch_size=4, collate_fn=list), epochs=1):
            num_steps += 1
            if ctx.step == dies_at:
                raise KilledError
    return num_steps


def numbers(start: int = 0, num: int = 16) -> TensorDataset:
    """Return numbers as samples."""
    return TensorDataset(torch.arange(start, start + num))


class Shards:
    """Shards of so many numbers."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def shards(self) -> list[int]:
        """Return their numbers."""
        return [*range(len(self.sizes))]

    def num_samples(self, shard: int) -> int:
        """Return a shard's size."""
        return self.sizes[shard]

    def iter_shard(self, shard: int) -> Iterator[int]:
        """Yield numbers."""
        yield from range(self.sizes[shard])


def copied(folder: Path, name: str) -> Any:
    """Return a table of 16 rows in a local copy."""
    return table(folder / name, local_copy=folder / "copies")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda _: Subset(numbers(), range(16)), lambda _: Subset(numbers(), [*range(15), 0])),
        (
            lambda _: ConcatDataset([numbers(num=6), numbers(num=10)]),
            lambda _: ConcatDataset([numbers(num=10), numbers(num=6)]),
        ),
        (
            lambda folder: StackDataset(copied(folder, "a"), numbers()),
            lambda folder: StackDataset(copied(folder, "b"), numbers()),
        ),
        (lambda folder: Doubled(copied(folder, "a")), lambda folder: Doubled(copied(folder, "b"))),
        (
            lambda folder: ConcatDataset([Subset(copied(folder, "a"), range(16))]),
            lambda folder: ConcatDataset([Subset(copied(folder, "b"), range(16))]),
        ),
        (lambda _: Shards(10, 6), lambda _: Shards(6, 10)),
    ],
    ids=["Subset", "ConcatDataset", "StackDataset", "a wrapper", "nested", "shards"],
)
def test_as_many_other_samples_arent_continued(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    before: Callable[[Path], Any],
    after: Callable[[Path], Any],
) -> None:
    """Of other indices, sizes or files, also below what torch or a transform puts around them."""
    numbered(tmp_path / "a", [8, 8], 8)
    numbered(tmp_path / "b", [10, 6], 8)
    with pytest.raises(KilledError):
        train(tmp_path, before(tmp_path), dies_at=2)
    with pytest.raises(KilledError):
        train(tmp_path, before(tmp_path), dies_at=3)
    assert not [each for each in caplog.messages if WARNING in each]
    assert train(tmp_path, after(tmp_path)) == 0
    assert [each for each in caplog.messages if WARNING in each]
    assert not read_ledger(tmp_path / "storage", "local").is_clean


@pytest.mark.parametrize("opened", [S3ImageFolder, image_folder])
def test_other_images_arent_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: Callable[[Path], Any]
) -> None:
    """Names count, below the folder. An image that was replaced, as errors advise, doesn't."""
    from PIL import Image

    for i in range(16):
        path = tmp_path / f"one/{'cat' if i % 2 else 'dog'}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2)).save(path)
    with pytest.raises(KilledError):
        train(tmp_path, opened(tmp_path / "one"), dies_at=2)
    other = (tmp_path / "one").rename(tmp_path / "other")
    Image.new("RGB", (20, 20)).save(other / "cat/1.png")
    with pytest.raises(KilledError):
        train(tmp_path, opened(other), dies_at=3)
    assert not [each for each in caplog.messages if WARNING in each]
    (other / "cat/1.png").rename(other / "cat/z.png")
    assert train(tmp_path, opened(other)) == 0
    assert [each for each in caplog.messages if WARNING in each]
