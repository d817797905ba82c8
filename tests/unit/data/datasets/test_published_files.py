"""Readers of a published dataset see only the files that its manifest names."""

import hashlib
import io
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_torch_ddp.data import array, table
from prefect_torch_ddp.data.datasets.dataset_manifest import DatasetFile
from prefect_torch_ddp.data.datasets.dataset_store import (
    local_dataset,
    new_files_folder,
    publish_written,
    published_dataset,
)
from prefect_torch_ddp.data.images.listing import list_dataset
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.forwarding import ForwardingStorage
from tests.unit.data.test_loader import loader_of


@pytest.fixture(params=[DirectoryStorage, ForwardingStorage], ids=["directory", "far"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Give a storage whose folders are directories, and one whose folders are `StorageBelow`."""
    made: Storage = request.param(tmp_path)
    return made


def parquet(*numbers: int) -> bytes:
    """Return a file with one column."""
    file = io.BytesIO()
    pq.write_table(pa.table({"n": list(numbers)}), file)
    return file.getvalue()


def npy(*numbers: int) -> bytes:
    """Return a file of NumPy's."""
    file = io.BytesIO()
    np.save(file, np.array(numbers))
    return file.getvalue()


def publish(storage: Storage, files: dict[str, bytes]) -> str:
    """Publish files as Dask workers write them; return the key of their folder."""
    folder, files_key = new_files_folder("d")
    listed = []
    for key, data in files.items():
        storage.write(f"{files_key}/{key}", data)
        digest = hashlib.sha256(data).hexdigest()
        listed.append(DatasetFile(key=key, num_bytes=len(data), sha256=digest))
    publish_written(storage, "d", folder, listed)
    return files_key


def rows_of(samples: Any) -> list[int]:
    """Return all rows in their order."""
    (batch,) = loader_of(samples, len(samples), shuffle=False)
    values = batch["n"] if isinstance(batch, dict) else batch
    found: list[int] = values.tolist()
    return found


@pytest.mark.parametrize(
    ("suffix", "file", "read"), [("parquet", parquet, table), ("npy", npy, array)]
)
def test_a_late_partition_is_not_read(
    storage: Storage, suffix: str, file: Any, read: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that was suspended may write one after the dataset was published. By the path,
    it is removed."""
    names = [f"part-000000-a.{suffix}", f"part-000001-b.{suffix}"]
    key = publish(storage, {names[0]: file(0, 1), names[1]: file(2)})
    storage.write(f"{key}/part-000001-c.{suffix}", file(2))
    where = published_dataset(storage, "d")
    assert rows_of(read(where)) == [0, 1, 2]
    assert [found.key for found in where.list()] == names
    if isinstance(storage, DirectoryStorage):
        caplog.set_level(logging.WARNING)
        assert rows_of(read(local_dataset(storage, "d"))) == [0, 1, 2]
        assert f"part-000001-c.{suffix} isn't in the manifest" in caplog.text
        assert len(list(storage.list(key))) == 2


@pytest.mark.parametrize("gone", ["a/1.parquet", "2.parquet", "b/4.parquet"])
def test_a_file_that_is_gone_is_named(storage: Storage, gone: str) -> None:
    """A rule of a bucket may have deleted it: a table of the others would look whole."""
    names = ["2.parquet", "a/1.parquet", "b/3.parquet", "b/4.parquet"]
    key = publish(storage, {name: parquet(number) for number, name in enumerate(names)})
    storage.delete(f"{key}/{gone}")
    where = published_dataset(storage, "d")
    says = f"/datasets/d/{key.rpartition('/')[2]}/{gone} is missing; delete .*/manifest.json to"
    with pytest.raises(StorageError, match=says):
        table(where)
    for listing in (list_dataset(where), where.list()):
        with pytest.raises(StorageError, match=says):
            list(listing)
    folder, _, name = gone.rpartition("/")
    if folder:
        with pytest.raises(StorageError, match=says):
            list(where.below(folder).list(name[:1]))
    assert [item.key for item in where.list("b/3")] == ["b/3.parquet"]
    storage.delete("datasets/d/manifest.json")
    publish(storage, {"2.parquet": parquet(9)})
    with pytest.raises(StorageError, match="was prepared again"):
        list(where.list_objects(""))


def test_folders_are_listed_as_their_files(storage: Storage) -> None:
    """Files at any depth count, and so do folders as storages; other files don't."""
    files = {"a/b/1.parquet": parquet(1), "a/2.parquet": parquet(2)}
    key = publish(storage, files)
    storage.write(f"{key}/a/b/late.parquet", b"")
    storage.write(f"{key}/late/1.parquet", b"")
    where = published_dataset(storage, "d")
    assert {found.key for found in list_dataset(where)} == files.keys()
    assert {found.key for found in where.list("a/b")} == {"a/b/1.parquet"}
    below = where.below("a")
    assert below.uri == f"{where.uri}/a"
    assert [found.key for found in below.list()] == ["2.parquet", "b/1.parquet"]
    assert [found.key for found in below.below("b").list_objects("")] == ["1.parquet"]
    assert below.below("b").read("1.parquet") == files["a/b/1.parquet"]


def test_it_is_the_folder_in_every_other_way(storage: Storage) -> None:
    """Paths, URIs and bytes are those of the folder, for fsspec, caches and images."""
    folder, where = storage.below(publish(storage, {"1": b"one"})), published_dataset(storage, "d")
    for answer in ("uri", "identity", "local_folder", "storage_options", "is_shared_by_hosts"):
        assert getattr(where, answer) == getattr(folder, answer), answer
    assert where.read("1") == b"one"
    opened = where.open_file("1")
    assert (opened is not None) == isinstance(storage, DirectoryStorage)
    if opened is not None:
        opened.close()


def test_another_process_reads_the_names_for_itself(tmp_path: Path) -> None:
    """The storage stays small for any number of files, and notices another dataset."""
    storage = DirectoryStorage(tmp_path)
    key = publish(storage, {f"{n:04d}": b"1" for n in range(1000)})
    where = published_dataset(storage, "d")
    sent = pickle.dumps(where)
    assert len(sent) < 1000
    arrived = pickle.loads(sent)
    assert arrived == where
    storage.write(f"{key}/late", b"1")
    assert len(list(arrived.list())) == 1000
    storage.delete("datasets/d/manifest.json")
    publish(storage, {"1": b"1"})
    with pytest.raises(StorageError, match=r"dataset d was prepared again, so .* start the run"):
        list(pickle.loads(sent).list())
