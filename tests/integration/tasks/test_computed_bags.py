"""Workers write what a Dask Bag has: dicts as a table, NumPy arrays as an array."""

import logging
from typing import Any

import cloudpickle
import dask.bag as db
import numpy as np
import pyarrow as pa
import pytest

from prefect_torch_ddp import InvalidParamsError
from prefect_torch_ddp.data import array, table
from prefect_torch_ddp.data.arrays.statistics import statistics_in
from prefect_torch_ddp.data.datasets.dataset_manifest import published_manifest
from prefect_torch_ddp.data.datasets.dataset_store import (
    find_dataset,
    new_files_folder,
    publish_written,
    published_dataset,
)
from prefect_torch_ddp.data.tables.writing import write_rows
from prefect_torch_ddp.protocol.prepared import LazyDataset
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tasks.gangs.computed import publish_computed
from tests.support.forwarding import ForwardingStorage
from tests.unit.data.test_loader import loader_of

pytestmark = pytest.mark.timeout(200)
logger = logging.getLogger("test")


def bag(*partitions: list[Any]) -> Any:
    """Return a Bag of these partitions."""
    return db.from_sequence(partitions, partition_size=1).flatten()


def published(
    client: Any, storage: Storage, *partitions: list[Any], by: Any = None
) -> DatasetReport:
    """Have a Bag of these partitions, or of what `by` makes of the items, written as `d`."""
    made = bag(*partitions) if by is None else bag(*partitions).map(by)
    pickled = cloudpickle.dumps(made)
    lazy = LazyDataset("dask.bag.core.Bag", "bag", pickled)
    return publish_computed(client, storage, "d", lazy, logger)


def batch_of(samples: Any) -> Any:
    """Return all samples in their order."""
    (batch,) = loader_of(samples, len(samples), shuffle=False)
    return batch


def test_dicts_become_a_table(storage, client, caplog) -> None:
    """A column has one type in all files, and a key that an item lacks is a null there."""
    caplog.set_level(logging.INFO)
    made = published(
        client,
        storage,
        [{"n": 0, "x": 1, "kind": "a"}, {"kind": None, "n": np.int64(1), "x": 2}],
        [],
        [{"n": 2, "x": 0.5, "kind": "b"}],
        [{"n": 3, "kind": "b"}, {"n": 4, "x": None, "kind": "b"}],
        [{"n": 5, "kind": "b"}],
    )
    files = published_manifest(storage, "d").files
    assert [file.num_rows for file in files] == [2, 1, 2, 1]
    assert len(list(storage.list("datasets/d/files"))) == made.num_files == 4
    fill = {"x": -1.0, "kind": "a"}
    rows = table(published_dataset(storage, "d"), categories={"kind": ["a", "b"]}, fill=fill)
    batch = batch_of(rows)
    assert batch["n"].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["x"].tolist() == [1, 2, 0.5, -1, -1, -1]
    assert batch["kind"].tolist() == [0, 0, 1, 1, 1, 1]
    assert "prepared 5 of 5 partitions" in caplog.text
    assert "prepared 2 of 2 partitions again" in caplog.text


class Overtaken(ForwardingStorage):
    """Another publisher of the dataset is faster, whenever one of its files is read."""

    def read(self, key: str) -> bytes:
        if key.endswith(".parquet"):
            folder, files_key = new_files_folder("d")
            file = write_rows(pa.table({"n": [7]}), self.inner, files_key, 0)
            publish_written(self.inner, "d", folder, [file])
        return super().read(key)


def test_the_dataset_of_a_faster_publisher_is_returned(client, tmp_path) -> None:
    """It has removed the files that the slower one wants to write again with all columns."""
    storage = Overtaken(tmp_path)
    made = published(client, storage, [{"n": 1}], [{"n": 2, "x": 0.5}])
    assert find_dataset(storage, "d") == made
    assert batch_of(table(published_dataset(storage.inner, "d")))["n"].tolist() == [7]
    assert len(list(storage.list("datasets/d/"))) == 2, "the manifest and its file"


def test_arrays_become_an_array(storage, client) -> None:
    """Samples lie along the first axis, in the order of the Bag, with their mean and std."""
    values = np.arange(7 * 2 * 3, dtype="float32").reshape(7, 2, 3)
    made = published(client, storage, [*values[:3]], [], [*values[3:4]], [*values[4:]])
    assert made.num_files == 4
    where = published_dataset(storage, "d")
    assert np.array_equal(batch_of(array(where)).numpy(), values)
    cut = batch_of(array(where, window={"dim_0": 5}, patch={"dim_2": 1}, normalize=True)).numpy()
    assert cut.shape == (9, 5, 2, 1)
    assert np.allclose(cut[0, :, :, 0], (values[:5, :, 0] - values.mean()) / values.std())
    assert statistics_in(storage, "d")["values"]["num_values"] == values.size


@pytest.mark.parametrize(
    ("partitions", "says"),
    [
        (
            [[{"a": 1}], [{"a": 1}, 2]],
            "item 1 of partition 1 of the Dask Bag has the type int, .* dicts",
        ),
        (
            [["a"]],
            "item 0 of partition 0 of the Dask Bag has the type str: .* dicts .* NumPy arrays",
        ),
        ([[{"a": 1, 2: 3}]], "item 0 of partition 0 .* has the key 2, which is no text"),
        ([[{}, {}]], "no item of partition 0 .* has a key"),
        ([[{"a": 1}, {"a": 2}, {"a": "b"}]], "a of item 2 of partition 0 .*str"),
        ([[{"a": None}, {"a": [1, 2]}]], "a of item 1 of partition 0 .* has the type list"),
        ([[{"a": {"b": 1}}]], "a of item 0 of partition 0 .* has the type dict"),
        ([[{"a": np.ones(2)}]], "a of item 0 of partition 0 .* has the type ndarray"),
        (
            [[{"a": 1}], [{"a": "1"}]],
            "a of the Dask Bag is (int64|string) in partition [01] and (int64|string) in .* [01]",
        ),
        ([[{"a": 2**60 + 1}], [{"a": 0.5}]], "a of partition 0 .* can't be double"),
        ([[{"a": 1}], [np.ones(2)]], "partition [01] .* has (dicts|arrays), .* (dicts|arrays)"),
        ([[np.ones(2), np.ones(3)]], r"item 1 of partition 0 .* shape \(3,\), .* \(2,\)"),
        ([[np.ones(2)], [np.ones(3)]], r"partition [01] .* shape \([23],\), .* \([23],\)"),
        ([[np.ones(2), np.ones(2, "int8")]], "item 1 of partition 0 .* int8 .* float64"),
        ([[np.array(["a"])]], "partition 0 .* <U1, of which no tensor can be made"),
        ([[], []], "the Dask Bag has no items"),
    ],
)
def test_what_no_dataset_can_hold_is_refused_by_name(partitions, says, client, tmp_path) -> None:
    """The error names the partition, the item and the key; there is no dataset."""
    storage = DirectoryStorage(tmp_path)
    with pytest.raises(InvalidParamsError, match=says):
        published(client, storage, *partitions)
    assert find_dataset(storage, "d") is None


def test_a_masked_array_is_refused(client, tmp_path) -> None:
    """Its mask would be lost."""
    with pytest.raises(InvalidParamsError, match=r"item 0 of partition 0 .* type MaskedArray"):
        published(client, DirectoryStorage(tmp_path), [np.ones(2)], by=np.ma.asarray)


def test_other_files_of_numpy_are_no_parts(tmp_path) -> None:
    """Files that a folder only happens to have aren't joined; parts of other shapes are refused."""
    np.save(tmp_path / "x.npy", np.ones((2, 3)))
    np.save(tmp_path / "part-0.npy", np.ones((2, 3)))
    with pytest.raises(InvalidParamsError, match=r"no \.npy file at .* give the file"):
        array(tmp_path)
    (tmp_path / "x.npy").rename(tmp_path / "part-1.npy")
    assert len(array(tmp_path)) == 4
    np.save(tmp_path / "part-2.npy", np.ones((2, 4)))
    with pytest.raises(InvalidParamsError, match=r"part-2.npy has float64 \(4,\) .* \(3,\)"):
        array(tmp_path)
