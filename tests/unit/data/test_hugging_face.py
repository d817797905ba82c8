"""Datasets of Hugging Face and torch's map-style ones in a loader, as they are; streams refused."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from prefect_torch_ddp.data.traits import differing
from prefect_torch_ddp.errors import InvalidParamsError
from tests.unit.data.test_loader import Stream, loader_of

datasets = pytest.importorskip("datasets")
NUM, BATCH = 23, 5


def rows(num: int = NUM) -> Any:
    """Return a dataset of numbers, vectors and texts."""
    vectors = np.arange(2 * num, dtype="float32").reshape(num, 2)
    columns = {"number": list(range(num)), "x": vectors, "name": [f"n{i}" for i in range(num)]}
    return datasets.Dataset.from_dict(columns)


def walk(dataset: Any, world: int, **options: Any) -> list[list[int]]:
    """Walk all ranks in lockstep; return the ids of each global batch, equal to the numbers."""
    loaders = [loader_of(dataset, BATCH, r, world, keep_ids=True, **options) for r in range(world)]
    batches = []
    for step in zip(*(loader.lockstep(0) for loader in loaders), strict=True):
        numbers = [n for data, share in step for n in data["number"][: share.num_local].tolist()]
        assert numbers == [n for _, share in step for n in share.samples]
        batches.append(numbers)
    return batches


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_dataset_of_arrow_is_read_a_batch_at_a_time(kind, tmp_path, monkeypatch) -> None:
    """Any number of ranks gives the same global batches, each of one __getitems__."""
    dataset = rows().with_format("torch")
    if kind == "disk":
        dataset.save_to_disk(tmp_path / "rows")
        dataset = datasets.load_from_disk(tmp_path / "rows").with_format("torch")
    asked: list[int] = []
    own = datasets.Dataset.__getitems__
    monkeypatch.setattr(
        datasets.Dataset,
        "__getitems__",
        lambda self, keys: asked.append(len(keys)) or own(self, keys),
    )
    batches = walk(dataset, 1)
    assert asked == [5, 5, 5, 5, 3]
    assert sorted(n for batch in batches for n in batch) == list(range(NUM))
    assert walk(dataset, 2) == batches


def test_a_batch_has_the_columns_in_their_format() -> None:
    """Vectors are stacked in torch's and NumPy's formats, and texts are a list."""
    for form in ("torch", "numpy"):
        batch = next(iter(loader_of(rows().with_format(form), BATCH)))
        assert batch["x"].shape == (BATCH, 2)
        assert batch["x"].dtype == torch.float32
        assert batch["x"][:, 0].tolist() == (2 * batch["number"]).tolist()
        assert batch["name"] == [f"n{n}" for n in batch["number"]]


def test_what_was_chosen_of_a_dataset_is_compared_between_ranks() -> None:
    """A rank with another order or choice of rows holds another dataset."""
    same, other = (rows().shuffle(seed=seed) for seed in (1, 2))
    for one, two in ((same, other), (Subset(same, range(9)), Subset(other, range(9)))):
        here, there = (loader_of(each, BATCH).traits for each in (one, two))
        assert here
        assert differing(here, loader_of(one, BATCH).traits) is None
        assert differing(here, there) is not None


def test_torchs_map_style_pipes_are_datasets() -> None:
    """They have a length and items, and nothing else is asked of them."""
    pipe = SequenceWrapper([{"number": n} for n in range(NUM)])
    assert walk(pipe, 2) == walk(pipe.map(dict), 1)


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Stream, "Stream is an IterableDataset"),
        (lambda: IterableWrapper([1, 2]), "IterableWrapperIterDataPipe is an IterableDataset"),
        (lambda: rows().to_iterable_dataset(), "IterableDataset is an IterableDataset"),
        (lambda: iter([1, 2]), "list_iterator has no __len__"),
    ],
)
def test_a_stream_is_refused_with_the_ways_out(dataset, name) -> None:
    """Before the first step: a map-style dataset, shards, or a loader of one's own."""
    ways = r"load_dataset without streaming=True.*iter_shard.*ctx\.steps\(loader, total=5000\)"
    with pytest.raises(InvalidParamsError, match=rf"^{name}.*{ways}"):
        loader_of(dataset(), BATCH)


def test_a_dictionary_of_splits_is_refused_by_their_names() -> None:
    """Its length is the number of splits, which would count as the number of samples."""
    splits = {"train": rows(), "test": rows(3)}
    stream = {"train": rows().to_iterable_dataset()}
    for dataset, names in (
        (datasets.DatasetDict(splits), "a DatasetDict of 'train', 'test'"),
        (datasets.IterableDatasetDict(stream), "a IterableDatasetDict of 'train'"),
        (splits, "a dict of 'train', 'test'"),
    ):
        with pytest.raises(InvalidParamsError, match=f"^{names} isn't one dataset: pass one"):
            loader_of(dataset, BATCH)
    batch = next(iter(loader_of({i: {"number": i} for i in range(NUM)}, BATCH)))
    assert len(batch["number"]) == BATCH
