"""Workers write a dataset that Dask computes, which is complete or absent, and ranks train
on it."""

import logging
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import dask
import dask.dataframe as dd
import pyarrow.parquet as pq
import pytest
from distributed.scheduler import KilledWorker

from prefect_torch_ddp import ClusterParams, InvalidParamsError, TrainParams, train_flow
from prefect_torch_ddp.data import table
from prefect_torch_ddp.data.datasets.dataset_manifest import published_manifest
from prefect_torch_ddp.data.datasets.dataset_store import find_dataset, local_dataset
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.protocol.prepared import LazyDataset
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.gangs.computed import publish_computed
from tests.support.forwarding import ForwardingStorage
from tests.support.gangs import own_cluster
from tests.support.s3_server import S3Server
from tests.unit.data.test_loader import loader_of
from tests.workloads.dask_parts import META, deadly_part, failing_part, part

pytestmark = pytest.mark.timeout(200)
logger = logging.getLogger("test")


def lazy(make, num: int = 6) -> LazyDataset:
    """Return a Dask DataFrame of as many partitions, as a rank sends it."""
    frame = dd.from_map(make, range(num), meta=META)
    return LazyDataset("dask.dataframe.DataFrame", "table", cloudpickle.dumps(frame))


def rows_of(storage, dataset_id: str) -> list[int]:
    """Return the rows of a published dataset, in order."""
    rows = table(local_dataset(storage, dataset_id), categories={"kind": ["even", "odd"]})
    (batch,) = loader_of(rows, len(rows), shuffle=False)
    assert batch["kind"].tolist() == [n % 2 for n in batch["number"].tolist()]
    return batch["number"].tolist()


EXPECTED = [n for n in range(600) if not 200 <= n < 300]


def test_partitions_become_files_of_a_dataset(storage, client, caplog) -> None:
    """Files have the order of the partitions, and an earlier publication stays."""
    caplog.set_level(logging.INFO)
    made = publish_computed(client, storage, "d", lazy(part), logger)
    assert made.num_files == 5
    assert [file.num_rows for file in published_manifest(storage, "d").files] == [100] * 5
    assert rows_of(storage, "d") == EXPECTED
    assert "prepared 6 of 6 partitions" in caplog.text
    again = publish_computed(client, storage, "d", lazy(part, 2), logger)
    assert again == made
    assert len(list(storage.list("datasets/d/files"))) == 5


def test_rights_about_unfinished_uploads_are_not_needed(
    s3_server: S3Server, client, caplog, tmp_path, monkeypatch
) -> None:
    """Without them the dataset is published with all its files; a warning names the right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    storage = s3_server.storage(user="writer")
    made = publish_computed(client, storage, "d", lazy(part), logger)
    assert "dataset d is published, but" in caplog.text
    assert "ListBucketMultipartUploads" in caplog.text
    assert find_dataset(storage, "d") == made
    assert rows_of(storage, "d") == EXPECTED


class LosesAnswers(ForwardingStorage):
    """The manifest is written, but its writer gets an error."""

    def write_if_absent(self, key: str, data: bytes) -> bool:
        super().write_if_absent(key, data)
        msg = "the answer got lost"
        raise StorageError(msg)


def test_a_published_dataset_keeps_its_files_if_the_publisher_fails(client, tmp_path) -> None:
    """The files belong to the manifest, whatever fails after that was written."""
    storage = LosesAnswers(tmp_path)
    made = publish_computed(client, storage, "d", lazy(part), logger)
    assert find_dataset(storage, "d") == made
    assert rows_of(storage.inner, "d") == EXPECTED


@pytest.mark.extended
def test_a_killed_worker_costs_only_its_partitions(tmp_path) -> None:
    """Only the lost partitions are computed again, and no file exists twice."""
    storage = DirectoryStorage(tmp_path / "store")
    options = {"scheduler_kwargs": {"allowed_failures": 0}}
    with own_cluster(2, **options) as (_, client):
        made = publish_computed(
            client, storage, "d", lazy(partial(part, dies_in=str(tmp_path))), logger
        )
    assert (tmp_path / "died").exists()
    assert rows_of(storage, "d") == EXPECTED
    assert len(list(storage.list("datasets/d/files"))) == made.num_files == 5


@pytest.mark.extended
@pytest.mark.parametrize(("workers", "threads"), [(2, 1), (1, 2)], ids=["alone", "with another"])
def test_a_partition_that_kills_every_worker_is_named(tmp_path, workers: int, threads: int) -> None:
    """Dask's error has a note with the partition's number and the workers that died.

    Another partition that a worker had isn't blamed.
    """
    storage = DirectoryStorage(tmp_path / "store")
    options = {"scheduler_kwargs": {"allowed_failures": 0}}
    with (
        own_cluster(workers, threads, **options) as (_, client),
        pytest.raises(KilledWorker) as raised,
    ):
        publish_computed(client, storage, "d", lazy(deadly_part, 2), logger)
    (note,) = raised.value.__notes__
    says = "number 1 of the partitions, counted from 0, was lost with its Dask worker 3 times: "
    times = {at: int(num) for at, num in re.findall(r"(tcp://[\d.:]+) \((\d)\)", note)}
    assert note.startswith(says)
    assert sum(times.values()) == 3
    assert raised.value.last_worker.address in times
    assert find_dataset(storage, "d") is None


def test_an_error_in_a_partition_is_the_users_and_leaves_nothing(client, tmp_path) -> None:
    """No dataset is left, and the next publication removes other workers' files."""
    storage = DirectoryStorage(tmp_path)
    with pytest.raises(ValueError, match="partition 1 can't be cleaned"):
        publish_computed(client, storage, "d", lazy(failing_part), logger)
    assert find_dataset(storage, "d") is None
    made = publish_computed(client, storage, "d", lazy(part), logger)
    assert len(list(storage.list("datasets/d/files"))) == made.num_files == 5


@pytest.mark.extended
def test_what_parquet_cant_hold_is_refused_with_its_partition(client, tmp_path) -> None:
    """The error for complex numbers names the partition."""
    storage = DirectoryStorage(tmp_path)
    frame = dd.from_map(mixed_part, range(2), meta={"odd": "complex128"})
    pickled = LazyDataset("dask.dataframe.DataFrame", "table", cloudpickle.dumps(frame))
    with pytest.raises(InvalidParamsError, match=r"partition [01] .* can't be written as Parquet"):
        publish_computed(client, storage, "d", pickled, logger)


@pytest.mark.parametrize(
    ("made", "meta", "says"),
    [
        (
            [1, None],
            "int64",
            "column a of partition 0 .* is double, but int64 in its meta: .*astype",
        ),
        ([math.nan], "int64", "column a .* is double, but int64 .* 1 missing values"),
        (["x", "y"], "float32", "column a .* is (large_)?string, but float32"),
        (["x", "y"], "datetime64[ns]", r"column a .* is (large_)?string, but datetime64\[ns\]"),
        ([True], "int64", "column a .* is bool, but int64"),
        ([0, 1], "bool", "column a .* is int64, but bool"),
        ([1.5], "int64", r"column a of partition 0 .* is double, but int64 .* 1\.5.* truncated"),
        ([2**24 + 1], "float32", "column a .* is int64, but float32 .* 16777217 not in range"),
        ([1], {"a": "int64", "b": "int64"}, "partition 0 .* lacks the column b, .* meta"),
    ],
    ids=[
        "NaN for int",
        "only NaN for int",
        "texts for float",
        "texts for times",
        "bool for int",
        "int for bool",
        "fractions for int",
        "int that float can't hold",
        "no such column",
    ],
)
def test_partitions_of_other_types_than_the_meta_are_refused(
    made, meta, says, client, tmp_path
) -> None:
    """The error names partition, column and types; such a partition isn't written."""
    storage, told = DirectoryStorage(tmp_path), meta if isinstance(meta, dict) else {"a": meta}
    frame = dd.from_map(partial(typed_part, made=made), range(1), meta=told)
    pickled = LazyDataset("dask.dataframe.DataFrame", "table", cloudpickle.dumps(frame))
    with pytest.raises(InvalidParamsError, match=says):
        publish_computed(client, storage, "d", pickled, logger)
    assert not list(storage.list("datasets/"))


@pytest.mark.parametrize(
    ("made", "meta"),
    [
        ([1, 2], "object"),
        ([[1], [2]], "object"),
        ([1, 2], "int8"),
        ([1.0, None], "Float64"),
        (["x", None], "string"),
        (["x", "y"], "category"),
    ],
    ids=[
        "int for object",
        "lists for object",
        "wider int",
        "nullable float",
        "texts with None",
        "texts for category",
    ],
)
def test_types_that_go_with_the_meta_are_written(made, meta, client, tmp_path) -> None:
    """Only the kind of a type counts, and objects, which Dask takes for texts, can be anything."""
    storage = DirectoryStorage(tmp_path)
    frame = dd.from_map(partial(typed_part, made=made), range(2), meta={"a": meta})
    pickled = LazyDataset("dask.dataframe.DataFrame", "table", cloudpickle.dumps(frame))
    assert publish_computed(client, storage, "d", pickled, logger).num_files == 2


def mapped_part(number: int):
    """Return texts, which pandas makes floats in partition 0: it has only NaN."""
    import pandas as pd

    return pd.DataFrame({"a": pd.Series(["x", "y"]).map({"x": "b"} if number else {})})


@pytest.mark.parametrize("meta", ["object", "string", "category"])
def test_a_partition_without_any_text_goes_with_the_others(meta, client, tmp_path) -> None:
    """Its file has nulls. For pandas they are floats, as after `map`."""
    storage = DirectoryStorage(tmp_path)
    frame = dd.from_map(mapped_part, range(2), meta={"a": meta})
    pickled = LazyDataset("dask.dataframe.DataFrame", "table", cloudpickle.dumps(frame))
    publish_computed(client, storage, "d", pickled, logger)
    rows = table(local_dataset(storage, "d"), categories=["a"], fill={"a": "none"})
    (batch,) = loader_of(rows, len(rows), shuffle=False)
    assert [rows.categories["a"][code] for code in batch["a"]] == ["none", "none", "b", "none"]


@pytest.mark.parametrize(
    ("second", "says"),
    [([1, 2], "int64"), ([1.5], "double"), ([True], "bool")],
    ids=["integers", "floats", "booleans"],
)
def test_other_values_than_the_texts_of_other_partitions_are_refused(
    second, says, client, tmp_path
) -> None:
    """The column may have any type, but one; the dataset was published, and no table of it."""
    storage = DirectoryStorage(tmp_path)
    frame = dd.from_map(typed_part, range(2), [["x", "y"], second], meta={"a": "object"})
    pickled = LazyDataset("dask.dataframe.DataFrame", "table", cloudpickle.dumps(frame))
    types = rf"(is {says} .* and (large_)?string|is (large_)?string .* and {says})"
    with pytest.raises(InvalidParamsError, match=rf"column a .*{types} in partition .*astype"):
        publish_computed(client, storage, "d", pickled, logger)
    assert not list(storage.list("datasets/"))


def typed_part(number: int, made: list[Any]):
    """Return a column of these values."""
    import pandas as pd

    return pd.DataFrame({"a": made})


@pytest.mark.parametrize("strings", [True, False], ids=["texts from objects", "objects"])
def test_partitions_have_the_types_of_the_meta_as_dask_writes_them(
    strings, client, tmp_path
) -> None:
    """A column of only None, integers for floats and whole floats for integers are cast."""
    storage = DirectoryStorage(tmp_path / "store")
    meta = {
        "all_none": "float64",
        "none_of_int": "int64",
        "none_of_bool": "bool",
        "none_of_time": "datetime64[ns]",
        "int_for_float": "float32",
        "nullable_for_float": "float64",
        "whole_for_int": "int64",
        "null_for_nullable": "Int64",
    }
    with dask.config.set({"dataframe.convert-string": strings}):
        frame = dd.from_map(differing_part, range(2), meta=meta)
        frame.to_parquet(str(tmp_path / "dask"), write_index=False)
        pickled = LazyDataset("dask.dataframe.DataFrame", "table", cloudpickle.dumps(frame))
        publish_computed(client, storage, "d", pickled, logger)
    folder = local_dataset(storage, "d")
    for ours, theirs in zip(
        sorted(folder.glob("*.parquet")), sorted((tmp_path / "dask").glob("*.parquet")), strict=True
    ):
        assert pq.read_table(ours).equals(pq.read_table(theirs))
    names = ["all_none", "int_for_float", "nullable_for_float", "whole_for_int"]
    rows = table(folder, columns=names, fill={"all_none": -1, "nullable_for_float": -2})
    (batch,) = loader_of(rows, len(rows), shuffle=False)
    assert {name: batch[name].tolist() for name in names} == {
        "all_none": [-1, -1, 0.5, 1.5],
        "int_for_float": [1, 2, 0.5, 1.5],
        "nullable_for_float": [1, -2, 0.5, 1.5],
        "whole_for_int": [3, 4, 5, 6],
    }


def differing_part(number: int):
    """Return a partition with types that differ from the meta; number 1 has those of the meta."""
    import pandas as pd

    if number:
        return pd.DataFrame(
            {
                "all_none": [0.5, 1.5],
                "none_of_int": [1, 2],
                "none_of_bool": [True, False],
                "none_of_time": pd.to_datetime(["2020-01-01", "2020-01-02"]).as_unit("ns"),
                "int_for_float": pd.Series([0.5, 1.5], dtype="float32"),
                "nullable_for_float": [0.5, 1.5],
                "whole_for_int": [5, 6],
                "null_for_nullable": pd.Series([1, None], dtype="Int64"),
            }
        )
    none = pd.Series([None, None], dtype="object")
    return pd.DataFrame(
        {
            "all_none": none,
            "none_of_int": none,
            "none_of_bool": none,
            "none_of_time": none,
            "int_for_float": [1, 2],
            "nullable_for_float": pd.Series([1, None], dtype="Int64"),
            "whole_for_int": [3.0, 4.0],
            "null_for_nullable": [1.0, None],
        }
    )


def mixed_part(number: int):
    """Return what has no type in Parquet."""
    import pandas as pd

    return pd.DataFrame({"odd": [complex(number, 1)]})


@pytest.mark.extended
@pytest.mark.usefixtures("prefect_api")
def test_a_flow_trains_on_what_dask_computed(shared: ClusterParams, tmp_path: Path) -> None:
    """`prepare` returns a Dask DataFrame, and the second run finds the dataset."""
    params = TrainParams(
        workload="tests.workloads.dask_table", storage=str(tmp_path), cluster=shared, ledger=True
    )
    report = train_flow(params)
    assert report.dataset.num_files == 5
    assert report.training.value["rows"] == 500
    assert train_flow(params).dataset == report.dataset
