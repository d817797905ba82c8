"""`table()`: Parquet files as a dataset in the exact order; what is read, filled and refused."""

import datetime as dt
import decimal
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data import table
from prefect_torch_ddp.data.sampler import mix_seed
from prefect_torch_ddp.data.tables import pieces as tables_pieces
from prefect_torch_ddp.data.tables.parquet_files import with_footers
from prefect_torch_ddp.data.traits import differing
from prefect_torch_ddp.errors import InvalidParamsError, ObjectChangedError, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, Readable
from tests.support.waiting import HANG_S
from tests.unit.data.tables.parquet_files import numbered, virtual_shares, walk, write
from tests.unit.data.test_loader import loader_of


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each row group of some rows a separate piece."""
    monkeypatch.setattr(tables_pieces, "PIECE_ROWS", 8)


def only_batch(rows: Any, **options: Any) -> Any:
    """Return all of a small table as one batch, in its own order."""
    (batch,) = loader_of(rows, len(rows), shuffle=False, **options)
    return batch


@dataclass(frozen=True)
class Counted(Readable):
    """A folder that notes what is read of it."""

    folder: DirectoryStorage
    reads: list[ObjectPart]

    @property
    def uri(self) -> str:
        return self.folder.uri

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        self.reads.extend(parts)
        return self.folder.read_many(parts)

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        return self.folder.list_objects(prefix)


@pytest.mark.parametrize(
    ("sizes", "group"),
    [
        ([30, 0, 25], 1),
        ([40, 33, 0, 60], 10),
        ([50_000, 100_001], 100_000),
        ([130_000, 60_000], 122_880),
        ([50_000, 1_000_001], 1_000_000),
    ],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_row_once_in_the_same_global_batches_on_any_number_of_ranks(
    sizes, group, shuffle, tmp_path, request
) -> None:
    """Row groups of 1, 10 and 100,000 rows, of DuckDB's size and of pyarrow's, and a file without
    any; from any batch on."""
    if group < 100:
        request.getfixturevalue("small_pieces")
    rows = table(numbered(tmp_path, sizes, group), shuffle_buffer=32 if group < 100 else 131_072)
    size = 7 if group < 100 else 9000
    whole = walk(rows, size, 1, epoch=1, shuffle=shuffle)
    flat = [number for batch in whole for number in batch]
    assert sorted(flat) == list(range(sum(sizes)))
    assert (flat == sorted(flat)) is not shuffle
    for world, start in ((2, 0), (4, len(whole) // 2), (3, len(whole) - 1)):
        assert walk(rows, size, world, epoch=1, start=start, shuffle=shuffle) == whole[start:]


@pytest.mark.usefixtures("small_pieces")
def test_elastic_shares_are_the_same_on_any_number_of_ranks(tmp_path) -> None:
    """Each virtual rank has its rows, wherever it is."""
    rows = table(numbered(tmp_path, [50, 41], 5), shuffle_buffer=30)
    found = virtual_shares(rows, 13, 4)
    assert virtual_shares(rows, 13, 1) == virtual_shares(rows, 13, 2) == found
    assert sorted(n for step in found for share in step for n in share) == list(range(91))


def test_a_batch_is_a_dict_of_tensors_by_column(tmp_path) -> None:
    """Each with the dtype of its column, contiguous, in the order of the columns."""
    columns = {
        "flag": [True, False, True],
        "byte": pa.array([1, 2, 255], pa.uint8()),
        "short": pa.array([1, 2, 65_535], pa.uint16()),
        "count": pa.array([1, 2, 2**32 - 1], pa.uint32()),
        "big": pa.array([1, 2, 2**63 - 1], pa.uint64()),
        "half": pa.array([0.5, 1.5, -2.0], pa.float16()),
        "ratio": pa.array([0.1, 0.2, 0.3], pa.float32()),
        "exact": [0.1, 0.2, 0.3],
        "__index_level_0__": [7, 8, 9],
    }
    batch = only_batch(table(write(tmp_path / "a.parquet", columns)))
    assert list(batch) == list(columns)[:-1]
    assert {name: str(tensor.dtype)[6:] for name, tensor in batch.items()} == {
        "flag": "bool",
        "byte": "uint8",
        "short": "int32",
        "count": "int64",
        "big": "int64",
        "half": "float16",
        "ratio": "float32",
        "exact": "float64",
    }
    assert batch["flag"].tolist() == [True, False, True]
    assert batch["short"].tolist()[-1], batch["count"].tolist()[-1] == (65_535, 2**32 - 1)
    assert batch["big"].tolist() == [1, 2, 2**63 - 1]
    assert batch["exact"].tolist() == [0.1, 0.2, 0.3]
    assert all(tensor.is_contiguous() for tensor in batch.values())
    chosen = only_batch(table(tmp_path, ["exact", "flag"]))
    assert list(chosen) == ["exact", "flag"]


def test_features_and_target_are_two_tensors(tmp_path) -> None:
    """X is float32 [rows, features], y [rows], or [rows, targets] of several."""
    columns = {
        "a": [1, 2, 3],
        "b": [0.5, 1.5, 2.5],
        "cut": [True, False, True],
        "kind": ["x", "y", "x"],
    }
    folder = write(tmp_path / "a.parquet", columns)
    x, y = only_batch(table(folder, features=["b", "cut"], target="a"))
    assert torch.equal(x, torch.tensor([[0.5, 1], [1.5, 0], [2.5, 1]]))
    assert torch.equal(y, torch.tensor([1, 2, 3]))
    _, y = only_batch(table(folder, features=["a"], target="kind", categories={"kind": ["y", "x"]}))
    assert torch.equal(y, torch.tensor([1, 0, 1]))
    _, y = only_batch(table(folder, features=["a"], target=["b"]))
    assert torch.equal(y, torch.tensor([0.5, 1.5, 2.5]))
    names = np.array(["b", "cut", "a"])  # an array, as the columns of a frame are
    again = only_batch(table(folder, features=names[:2], target=names[2:]))
    assert torch.equal(again[0], x)
    assert again[1].tolist() == [1, 2, 3]
    x, y = only_batch(table(folder, features=["b"], target=["a", "cut"]))
    assert torch.equal(y, torch.tensor([[1, 1], [2, 0], [3, 1]]))
    with pytest.raises(InvalidParamsError, match="targets a, b mix floats with other types"):
        table(folder, features=["cut"], target=["a", "b"])
    x = only_batch(table(folder, features=["a"]))
    assert torch.equal(x, torch.tensor([[1.0], [2.0], [3.0]]))


def test_collate_fn_is_given_the_batch_of_tensors(tmp_path) -> None:
    """And what it returns is the batch."""
    rows = table(numbered(tmp_path, [64], 8), ["number"])
    doubled = loader_of(rows, 16, collate_fn=lambda batch: batch["number"] * 2)
    assert sorted(n for batch in doubled for n in batch.tolist()) == list(range(0, 128, 2))


def test_categories_are_codes_by_a_mapping_that_is_given_or_read(tmp_path) -> None:
    """Texts, pandas' categories with another order in each file, and nulls that are filled."""
    frames = [["oak", "ash", None, "oak"], ["elm", "oak", "elm", "ash"]]
    for i, values in enumerate(frames):
        frame = pd.DataFrame(
            {"tree": values, "kind": pd.Categorical(["b", "a", "b", "a"][i:] + ["b"] * i)}
        )
        frame.to_parquet(tmp_path / f"{i}.parquet", row_group_size=3)
    given = {"tree": ["oak", "elm", "ash"], "kind": ["b", "a"]}
    rows = table(tmp_path, categories=given, fill={"tree": "elm"})
    batch = only_batch(rows)
    assert batch["tree"].tolist() == [0, 2, 1, 0, 1, 0, 1, 2]
    assert batch["kind"].tolist() == [0, 1, 0, 1, 1, 0, 1, 0]
    assert rows.categories == {"tree": ("oak", "elm", "ash"), "kind": ("b", "a")}
    rows = table(tmp_path, ["tree"], categories=["tree"], fill={"tree": "none"})
    assert rows.categories == {"tree": ("ash", "elm", "oak", "none")}
    assert only_batch(rows)["tree"].tolist() == [2, 0, 3, 2, 1, 2, 1, 0]
    rows = table(tmp_path, ["kind"], categories={"kind": ["b"]})
    with pytest.raises(InvalidParamsError, match=r"column kind of .*0\.parquet.* the value 'a'"):
        only_batch(rows)
    with pytest.raises(InvalidParamsError, match=r"column tree of .* holds texts: list the values"):
        table(tmp_path)
    with pytest.raises(InvalidParamsError, match="feature tree is a category"):
        table(tmp_path, features=["tree"], categories=["tree"], fill={"tree": "oak"})


@pytest.mark.parametrize("options", [{}, {"local_copy": True}])
def test_another_table_has_the_codes_of_the_trained_one(options, tmp_path, monkeypatch) -> None:
    """If it is given its `categories`; a text that wasn't there is then an error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, values in (("train", ["a", "b"]), ("test", ["b"]), ("new", ["b", "z"])):
        write(tmp_path / name / "x.parquet", {"tree": values})
    trained = table(tmp_path / "train", categories=["tree"], **options)
    test = table(tmp_path / "test", categories=trained.categories, **options)
    assert (only_batch(trained)["tree"].tolist(), only_batch(test)["tree"].tolist()) == (
        [0, 1],
        [1],
    )
    with pytest.raises(InvalidParamsError, match="has the value 'z', which isn't one of"):
        only_batch(table(tmp_path / "new", categories=trained.categories, **options))


@pytest.mark.parametrize("statistics", [True, False])
def test_a_null_is_refused_by_column_or_filled(statistics, tmp_path) -> None:
    """By the footer before anything is read, else when it is read, with file and row groups."""
    columns = {
        "age": pa.array([1, None, 3], pa.int32()),
        "sum": [1.5, None, float("nan")],
        "new": [None, True, None],
        "none": pa.nulls(3),
        "id": [1, 2, 3],
    }
    folder = write(tmp_path / "a.parquet", columns, write_statistics=statistics)
    write(tmp_path / "b.parquet", columns | {"none": [4, 5, 6]}, write_statistics=statistics)
    for name in ("age", "sum", "new", "none"):
        with pytest.raises(InvalidParamsError, match=rf"column {name} of .*a\.parquet.* null"):
            only_batch(table(folder, [name, "id"]))
    filled = table(folder, fill={"age": -1, "sum": 0, "new": False, "none": 9})
    as_numpy = {"age": np.int32(-1), "sum": np.float32(0), "new": np.False_, "none": np.int64(9)}
    batch = only_batch(filled)
    again = only_batch(table(folder, fill=as_numpy))
    assert all(batch[each].nan_to_num().equal(again[each].nan_to_num()) for each in batch)
    assert batch["age"].tolist()[:3] == [1, -1, 3]
    assert batch["sum"].tolist()[:2] == [1.5, 0.0]
    assert batch["sum"][2].isnan()  # no null, and left as it is
    assert batch["new"].tolist()[:3] == [False, True, False]
    assert batch["none"].tolist() == [9, 9, 9, 4, 5, 6]
    assert (
        only_batch(table(folder, ["age"], filters=[("age", ">", 0)]))["age"].tolist() == [1, 3] * 2
    )
    for name, value in (("age", 0.5), ("age", True), ("sum", "0"), ("new", 0)):
        with pytest.raises(InvalidParamsError, match=f"fill has .* for column {name}, which is"):
            table(folder, [name], fill={name: value})
    with pytest.raises(InvalidParamsError, match="fill names other, but only"):
        table(folder, ["id"], fill={"other": 0})


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (pa.array([[1], [2]]), "flatten"),
        (pa.array([{"x": 1}, {"x": 2}]), "flatten"),
        (pa.array([decimal.Decimal("1.5"), decimal.Decimal("2.5")]), "cast it to float64"),
        (pa.array([dt.date(2026, 1, 1)] * 2), "compute numbers"),
        (pa.array([b"a", b"b"]), "leave it out"),
    ],
    ids=["list", "struct", "decimal", "time", "binary"],
)
def test_a_column_that_cant_be_a_tensor_is_refused_by_name(values, what, tmp_path) -> None:
    """The error has file, type and way out, and a column that isn't read is accepted."""
    folder = write(tmp_path / "a.parquet", {"odd": values, "n": [1, 2]})
    with pytest.raises(InvalidParamsError, match=rf"column odd of .*a\.parquet is .*: {what}"):
        table(folder)
    assert only_batch(table(folder, ["n"]))["n"].tolist() == [1, 2]


def test_files_may_differ_where_their_columns_agree(tmp_path) -> None:
    """Another order, more columns, other widths, nothing but nulls: numbers get the wider type."""
    write(
        tmp_path / "a.parquet", {"n": pa.array([1], pa.int32()), "f": pa.array([0.5], pa.float32())}
    )
    write(tmp_path / "b.parquet", {"f": [0.1], "more": ["x"], "n": pa.array([2**40], pa.int64())})
    write(tmp_path / "c.parquet", {"f": pa.nulls(1), "n": pa.array([3], pa.uint8())})
    batch = only_batch(table(tmp_path, fill={"f": 9.0}))
    assert batch["n"].dtype, batch["f"].dtype == (torch.int64, torch.float64)
    assert batch["n"].tolist() == [1, 2**40, 3]
    assert batch["f"].tolist() == [0.5, 0.1, 9.0]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"n": [0.5]}, "column n is double in .*b.parquet and int64 in .*a.parquet"),
        ({"n": ["1"]}, "column n is string in .*b.parquet and int64 in"),
        ({"m": [1]}, "b.parquet has no column of the name 'n'; there are m"),
    ],
    ids=["float", "text", "missing"],
)
def test_files_that_dont_agree_are_refused_by_file_and_column(other, what, tmp_path) -> None:
    """Before anything is read."""
    write(tmp_path / "a.parquet", {"n": [1, 2]})
    write(tmp_path / "b.parquet", other)
    with pytest.raises(InvalidParamsError, match=what):
        table(tmp_path)


@pytest.mark.parametrize(
    ("filters", "numbers"),
    [
        ([("count", "not in", [3])], [5, 6]),
        ([("count", "!=", 3)], [5, 6]),
        ([("count", "in", [None, 1])], [5]),
        ([[("count", "not in", [3])], [("number", "==", 2)]], [2, 5, 6]),
        ([("value", "!=", 3.0)], [2, 5, 6]),
        ([("value", "not in", [3.0])], [2, 5, 6]),
        ([("value", "in", [float("nan")])], [2]),
    ],
)
@pytest.mark.usefixtures("small_pieces")
def test_a_null_never_passes_and_nan_does_wherever_it_lies(filters, numbers, tmp_path) -> None:
    """By pyarrow, a null passes "not in"; and the statistics of a row group leave NaN out."""
    values = pa.array([3.0, float("nan"), 3.0, 3.0, 1.0, 2.0])
    counts = pa.array([3, None, 3, 3, 1, 2])
    columns = {"number": [1, 2, 3, 4, 5, 6], "value": values, "count": counts}
    folder = write(tmp_path / "a.parquet", columns, row_group_size=2)
    rows = table(folder, columns=["number"], filters=filters)
    assert only_batch(rows)["number"].tolist() == numbers


@pytest.mark.usefixtures("small_pieces")
def test_filters_choose_rows_and_leave_row_groups_unread(tmp_path) -> None:
    """Exactly the rows that pass, each once on any number of ranks; what the footer rules out
    isn't read."""
    numbered(tmp_path, [100, 100], 10)
    reads: list[ObjectPart] = []
    source = Counted(DirectoryStorage(tmp_path), reads)
    rows = table(source, ["half", "number"], filters=[("number", ">=", 95), ("number", "<", 118)])
    assert len(rows) == 23
    assert {part.key for part in reads} == {"000.parquet", "001.parquet"}
    batch = only_batch(rows)
    assert batch["number"].tolist() == list(range(95, 118))
    assert batch["half"].tolist() == [n / 2 for n in range(95, 118)]
    assert len(rows.rows.pieces) == 3
    either = table(tmp_path, filters=[[("number", "<", 3)], [("half", "==", 50.0)]])
    assert only_batch(either)["number"].tolist() == [0, 1, 2, 100]
    numbers = table(tmp_path, filters=[("number", "in", list(range(40, 61)))], shuffle_buffer=16)
    for world in (1, 2):
        found = walk_numbers(numbers, world)
        assert sorted(found) == list(range(40, 61))
    with pytest.raises(InvalidParamsError, match="no row passes the filters"):
        table(tmp_path, filters=[("number", "<", 0)])
    with pytest.raises(InvalidParamsError, match="no column of the name 'year'"):
        table(tmp_path, filters=[("year", "==", 2020)])
    with pytest.raises(InvalidParamsError, match=r"filters .* can't be used"):
        table(tmp_path, filters=[("number", "about", 1)])


@pytest.mark.parametrize("local_copy", [False, True], ids=["in place", "as a copy"])
def test_a_text_is_no_list_of_values_in_filters(tmp_path, local_copy: bool) -> None:
    """It would be the set of its letters, and the test rows would be trained on."""
    write(tmp_path / "a.parquet", {"n": [1, 2, 3], "split": ["train", "test", "val"]})
    options = {"columns": ["n"], "local_copy": local_copy}
    for how in ("in", "not in"):
        test = ("split", how, "test")
        says = rf"\('split', '{how}', 'test'\) takes a list: \['test'\]"
        for filters in ([test], [("n", ">", 0), test], [[("n", ">", 0)], [test]]):
            with pytest.raises(InvalidParamsError, match=says):
                table(tmp_path, filters=filters, **options)
    rest = table(tmp_path, filters=[("split", "not in", ["test"])], **options)
    assert only_batch(rest)["n"].tolist() == [1, 3]


def walk_numbers(rows: Any, world: int) -> list[int]:
    """Return the numbers that all ranks see in an epoch."""
    loaders = [loader_of(rows, 5, rank, world) for rank in range(world)]
    return [n for loader in loaders for batch in loader for n in batch["number"].tolist()]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fill": -1}, "fill is -1; give a dict by column, such as {'age': 0}"),
        ({"fill": 0}, "fill is 0; give a dict by column"),
        ({"fill": [("age", 0)]}, r"fill is \[.*\]; give a dict by column"),
        ({"categories": "kind"}, r"categories is 'kind'; give a list .* such as \['kind'\]"),
        (
            {"features": frozenset("ab")},
            "features is a set, which has another order in each process: give a list",
        ),
        ({"features": ["a"], "target": {"b"}}, "target is a set, .*: give a list"),
        ({"categories": {"a": ["x"], "b": {"x"}}}, r"categories\['b'\] is a set, .*: give a list"),
    ],
)
def test_arguments_of_another_kind_are_refused(options, says, tmp_path) -> None:
    """Before anything is opened: nothing is there."""
    with pytest.raises(InvalidParamsError, match=says):
        table(tmp_path / "nothing", **options)


@pytest.mark.parametrize("local", [False, True])
def test_a_set_of_columns_is_read_in_one_order(tmp_path, local) -> None:
    """The same in each process; a batch is a dict, where it doesn't count."""
    folder = numbered(tmp_path / "t", [8], 8)
    copies = tmp_path / "copies" if local else False
    listed, *sets = (
        table(folder, names, local_copy=copies)
        for names in (["half", "number"], {"number", "half"}, frozenset({"half", "number"}))
    )
    for rows in sets:
        assert loader_of(rows, 4).traits == loader_of(listed, 4).traits
        assert [*only_batch(rows)] == ["half", "number"]
    assert len([*copies.glob("*/copy.json")] if copies else [0]) == 1


@pytest.mark.usefixtures("small_pieces")
def test_a_resume_reads_nothing_of_what_was_read(tmp_path) -> None:
    """A resume in mid-epoch doesn't read the windows before it."""
    reads: list[ObjectPart] = []
    rows = table(
        Counted(DirectoryStorage(numbered(tmp_path, [16] * 10, 8)), reads), shuffle_buffer=16
    )
    loader = loader_of(rows, 8, shuffle=False)
    reads.clear()
    found = [batch["number"].tolist() for batch, _ in loader.lockstep(0, start_batch=18)]
    assert found == [list(range(144, 152)), list(range(152, 160))]
    assert {part.key for part in reads} <= {"009.parquet", "000.parquet"}  # and the next epoch's


@pytest.mark.usefixtures("small_pieces")
def test_at_most_two_windows_are_in_memory(tmp_path) -> None:
    """The one that is read from, and the next."""
    rows = table(numbered(tmp_path, [16] * 10, 8), shuffle_buffer=32)
    loader = loader_of(rows, 8)
    reader = loader._loader.dataset
    for _ in loader.lockstep(0):
        assert len(reader._pieces) <= 2
        assert all(sum(rows.rows.pieces[p].num_rows for p in key) <= 32 for key in reader._pieces)


def test_a_table_of_one_window_is_decoded_once(tmp_path) -> None:
    """The table stays in memory, and each epoch has another order."""
    reads: list[ObjectPart] = []
    rows = table(Counted(DirectoryStorage(numbered(tmp_path, [60, 60], 10)), reads))
    loader = loader_of(rows, 8)
    reads.clear()
    epochs = [[n for b, _ in loader.lockstep(e) for n in b["number"].tolist()] for e in range(3)]
    assert len(reads) == 2  # one for each file's only piece
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == list(range(120)) for epoch in epochs)


def test_files_are_found_in_folders_lists_and_by_name(tmp_path) -> None:
    """Sorted by name at any depth, without what begins with a dot or an underscore; a list is
    taken as it is. A folder may be named as a file, as Dask and Spark name theirs."""
    data = tmp_path / "data.parquet"
    for i, name in enumerate(["b/0.parquet", "a.parquet", "c.pq"]):
        write(data / name, {"number": [i]})
    for name in ("_metadata.parquet", ".hidden/x.parquet", "_tmp/y.parquet", "notes.txt"):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_bytes(b"no table")
    write(tmp_path / "data.parquet2.parquet", {"number": [8]})
    for where in (data, str(data), DirectoryStorage(data)):
        assert only_batch(table(where))["number"].tolist() == [1, 0, 2]
    assert only_batch(table(data / "b/0.parquet"))["number"].tolist() == [0]
    listed = table([data / "c.pq", str(data / "a.parquet")])
    assert only_batch(listed)["number"].tolist() == [2, 1]
    storage = DirectoryStorage(tmp_path)
    inside = table(["data.parquet/c.pq", "data.parquet/b/0.parquet"], storage=storage)
    assert only_batch(inside)["number"].tolist() == [2, 0]
    assert only_batch(table("data.parquet/b", storage=storage))["number"].tolist() == [0]
    for where in (tmp_path / "none", [data / "none.parquet"]):
        with pytest.raises(InvalidParamsError, match=r"there is no Parquet file in .*none"):
            table(where)
    with pytest.raises(InvalidParamsError, match="empty list"):
        table([])


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # which Dask uses
@pytest.mark.parametrize(
    "how",
    [{}, {"write_metadata_file": True}, {"write_index": False, "row_group_size": 7}],
    ids=["plain", "with _metadata", "small row groups"],
)
def test_a_folder_that_dask_wrote_is_a_table(how, tmp_path) -> None:
    """Without its index and its _metadata; parts may have no rows, but not all of them."""
    frame = pd.DataFrame({"number": range(300), "kind": pd.Categorical(["a", "b"] * 150)})
    parts = dd.from_pandas(frame, npartitions=12)
    how = {**how, "compute_kwargs": {"scheduler": "sync"}}
    parts[(parts.number < 60) | (parts.number >= 150)].to_parquet(str(tmp_path / "t"), **how)
    rows = table(tmp_path / "t", categories=["kind"])
    batch = only_batch(rows)
    assert list(batch) == ["number", "kind"]
    assert torch.equal(batch["kind"], batch["number"] % 2)
    assert sorted(batch["number"].tolist()) == [*range(60), *range(150, 300)]
    assert sorted(walk_numbers(rows, 2)) == [*range(60), *range(150, 300)]
    parts[parts.number < 0].to_parquet(str(tmp_path / "none"), **how)
    with pytest.raises(InvalidParamsError, match=r"12 files .*none/part\.0\.parquet .* no row"):
        table(tmp_path / "none", ["number"])


def test_a_file_that_is_no_parquet_or_was_replaced_is_named(tmp_path) -> None:
    """An empty file, a truncated one, one that changed after its footer was read."""
    folder = numbered(tmp_path / "a", [40], 10)
    rows = table(folder)
    whole = (folder / "000.parquet").read_bytes()
    (folder / "000.parquet").write_bytes(whole + b" ")
    with pytest.raises(ObjectChangedError, match=r"000\.parquet.* changed"):
        only_batch(rows)
    for content in (b"", whole[:-20], b"PAR1" + b"\xff" * 40 + b"\x20\0\0\0PAR1"):
        (folder / "000.parquet").write_bytes(content)
        with pytest.raises(StorageError, match=r"000\.parquet .* can't be read as Parquet"):
            table(folder)
    body = bytearray(whole)
    body[4:80] = bytes(76)
    (folder / "000.parquet").write_bytes(body)
    with pytest.raises(StorageError, match=r"000\.parquet can't be decoded"):
        only_batch(table(folder))


def test_a_table_without_columns_is_refused(tmp_path) -> None:
    """So that no training gets batches without values: also if the first file has only an index."""
    pd.DataFrame(index=[3, 5]).to_parquet(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", {"number": [1, 2]})
    with pytest.raises(InvalidParamsError, match=r"a\.parquet has no column to read"):
        table(tmp_path)


@dataclass(frozen=True)
class Together(DirectoryStorage):
    """A folder that gives what is read once all folders of the barrier are being read."""

    barrier: threading.Barrier = field(kw_only=True)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        self.barrier.wait(HANG_S)
        return super().read_many(parts)


def test_footers_of_a_list_of_files_are_read_at_once(tmp_path) -> None:
    """Each file of a list has a storage of its own: one after the other would take long."""
    numbered(tmp_path, [3, 4, 5], 9)
    barrier = threading.Barrier(3)
    storages = [Together(tmp_path, barrier=barrier) for _ in range(3)]
    apart = list(zip(storages, storages[0].list_objects(""), strict=True))
    assert [file.sizes for file in with_footers(apart)] == [[3], [4], [5]]


def test_a_large_footer_is_read_whole(tmp_path) -> None:
    """One of more than the 64 KiB that are read at first."""
    columns = {f"column_{i:04d}_{'x' * 60}": [float(i)] * 3 for i in range(400)}
    folder = write(tmp_path / "a.parquet", {"number": [0, 1, 2], **columns}, row_group_size=1)
    assert only_batch(table(folder, ["number"]))["number"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_a_null_among_floats_becomes_the_nearest_one(kind, tmp_path) -> None:
    """Also of an integer that has more digits, and in a file of nulls only."""
    dtype = np.dtype(kind)
    column = pa.array(np.array([0.5, 1.0], dtype), mask=np.array([False, True]))
    write(tmp_path / "0.parquet", {"a": column})
    write(tmp_path / "1.parquet", {"a": pa.nulls(1)})
    for value in (2, -0.1, 2**11 + 3, 2**15 + 1, float("inf")):
        found = only_batch(table(tmp_path, fill={"a": value}))["a"]
        expected = np.array([0.5, value, value], dtype)
        assert found.numpy().dtype == dtype
        assert found.tolist() == expected.tolist()
    if kind != "float16":
        found = only_batch(table(tmp_path, fill={"a": 2**60 + 1}))["a"]
        assert found.tolist() == [0.5, 2.0**60, 2.0**60]


def test_a_fill_needs_room_in_the_tensor_and_not_in_the_file(tmp_path) -> None:
    """What no tensor of the column's dtype can hold is refused before anything is read."""
    small = {"a": pa.array([1, None], pa.uint16()), "b": pa.array([1, None], pa.uint8())}
    folder = write(tmp_path / "a.parquet", {**small, "c": pa.array([1, None], pa.float32())})
    assert only_batch(table(folder, ["a"], fill={"a": -1}))["a"].tolist() == [1, -1]
    for name, value in (("b", -1), ("b", 256), ("a", 2**31), ("c", 1e300), ("c", -(10**400))):
        with pytest.raises(InvalidParamsError, match=f"column {name}, which .* can't hold"):
            table(folder, [name], fill={name: value})


@pytest.mark.parametrize("options", [{}, {"local_copy": True}])
def test_what_float32_cant_hold_is_refused_or_warned_of(
    options, tmp_path, caplog, monkeypatch
) -> None:
    """A finite number is never made infinite; of integers that lose digits, a warning tells."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seconds, large = [1_700_000_001, 1, 1_700_000_003], [2**25, -(2**24), 0]
    exact = {"large": large, "inf": [float("inf"), 1.0, float("nan")], "y": seconds}
    folder = write(tmp_path / "a/a.parquet", {**exact, "at": seconds}, row_group_size=1)
    read = {"features": ["large", "inf"], "target": "y", **options}
    x, y = only_batch(table(folder, **read))
    assert torch.equal(x[:, 0], torch.tensor(large).float())
    assert x[0, 1].isinf()
    assert y.tolist() == seconds
    assert "rounds" not in caplog.text
    x = only_batch(table(folder, features=["at"], **options))
    assert x[0, 0] == 1_700_000_000
    says = r"column at of .*a\.parquet.* has 1700000001, which float32 rounds to 1700000000"
    assert re.search(says, caplog.text)
    assert caplog.text.count("rounds") == 1
    write(tmp_path / "b/b.parquet", {"x": [1.0, -1e39], "y": [1, 2]})
    for read in ({"features": ["x"]}, {"features": ["y"], "target": "x"}):
        says = r"column x of .*b\.parquet.* has -1e\+39, .* too large for float32"
        with pytest.raises(InvalidParamsError, match=says):
            only_batch(table(tmp_path / "b", **read, **options))


@pytest.mark.parametrize(
    ("filters", "what"),
    [
        (
            [("number", ">=", "2")],
            "in which number is int64: Function 'greater_equal' has no kernel",
        ),
        ([("number", "in", ["2"])], "in which number is int64: Function"),
        (
            [("number", "<", 2**70)],
            "filters [('number', '<', 1180591620717411303424)] can't be used",
        ),
        (pc.field("number") > 1, "write [(column, '==', value), ...]"),
    ],
)
def test_filters_that_cant_be_used_are_refused(filters, what, tmp_path) -> None:
    """Before a row is read, by file and type."""
    with pytest.raises(InvalidParamsError, match=re.escape(what)):
        table(numbered(tmp_path, [4], 2), filters=filters)


def test_a_time_without_a_zone_is_refused_for_times_with_one(tmp_path) -> None:
    """The two can't be compared; with a zone it selects."""
    noon = dt.datetime.fromisoformat("2020-01-01T12:00")
    times = pa.array([noon, noon], pa.timestamp("us", "Europe/Oslo"))
    write(tmp_path / "a.parquet", {"t": times, "y": [1, 2]})
    with pytest.raises(InvalidParamsError, match=r"in which t is timestamp\[us, tz=Europe/Oslo\]"):
        table(tmp_path, ["y"], filters=[("t", ">=", noon)])
    assert len(table(tmp_path, ["y"], filters=[("t", ">=", noon.replace(tzinfo=dt.UTC))])) == 2


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"columns": ["half"], "features": ["half"]}, "pass only one"),
        ({"target": "half"}, "target= needs features="),
        ({"columns": "half"}, "give a list of names"),
        ({"columns": []}, "give a list of names"),
        ({"features": ["half", "half"]}, "named twice"),
        ({"columns": ["other"]}, "no column of the name 'other'; there are number, half"),
        ({"features": ["half"], "target": ["half", "number"]}, "named twice"),
        ({"features": ["half"], "categories": {"half": ["x"]}}, "is float, not text"),
        ({"shuffle_buffer": 0}, "shuffle_buffer is 0"),
    ],
)
def test_arguments_that_cant_go_together_are_refused(arguments, what, tmp_path) -> None:
    """By name, before anything is read."""
    with pytest.raises(InvalidParamsError, match=re.escape(what)):
        table(numbered(tmp_path, [4], 2), **arguments)


def test_what_a_table_cant_do_in_a_loader_is_refused(tmp_path) -> None:
    """Weights, other seeds, single rows: each with what to do instead."""
    rows = table(numbered(tmp_path, [4], 2))
    with pytest.raises(
        InvalidParamsError, match=r"weights .* can't be used with a table or an array"
    ):
        loader_of(rows, 2, weights=[1.0] * 4)
    with pytest.raises(InvalidParamsError, match="seed_samples"):
        loader_of(rows, 2, seed_samples=False)
    with pytest.raises(InvalidParamsError, match="choose rows with filters="):
        rows[0]
    with pytest.raises(InvalidParamsError, match="choose rows with filters="):
        list(loader_of(torch.utils.data.Subset(rows, [0, 1]), 2))


def test_orders_are_told_apart_by_layout_seed_and_window(tmp_path) -> None:
    """What ranks compare, and a checkpoint with the loader that resumes."""
    one, other = numbered(tmp_path / "a", [16_000], 1000), numbered(tmp_path / "b", [16_000], 8001)
    orders = {
        loader_of(table(one), 2).order,
        loader_of(table(other), 2).order,
        loader_of(table(one), 2, seed=1).order,
        loader_of(table(one, shuffle_buffer=500), 2).order,
        loader_of(table(one), 2, shuffle=False).order,
    }
    assert len(orders) == 5
    assert loader_of(table(one), 2).traits == loader_of(table(one), 2).traits
    assert mix_seed(0, 1) != mix_seed(1, 0)


@pytest.mark.parametrize("copies", [False, True], ids=["in windows", "a local copy"])
def test_ranks_that_take_columns_or_texts_in_another_order_are_told_apart(
    tmp_path, *, copies: bool
) -> None:
    """As from list({"a", "b"}), which has another order in each process; their files are equal."""
    columns = {"a": [1.0] * 4, "b": [1.0] * 4, "city": ["Oslo", "Oslo", "Rome", None]}
    folder = write(tmp_path / "t/0.parquet", columns)

    def traits(**options: Any) -> Any:
        copy = tmp_path / "copies" if copies else False
        rows = table(folder, fill={"city": "Bonn"}, local_copy=copy, **options)
        return loader_of(rows, 2).traits

    def codes(*cities: str) -> dict[str, Any]:
        return {"target": "city", "categories": {"city": cities}}

    first = traits(features=["a", "b"], **codes("Bonn", "Oslo", "Rome", "Ulm"))
    assert not differing(first, traits(features=["a", "b"], **codes("Bonn", "Oslo", "Rome", "Ulm")))
    other = traits(features=["b", "a"], **codes("Bonn", "Oslo", "Rome", "Ulm"))
    assert "list of columns" in differing(first, other)
    other = traits(features=["a", "b"], **codes("Bonn", "Oslo", "Rome", "Kiel"))
    assert "list of categories" in differing(first, other)
    if not copies:  # of a dict the order of the columns doesn't count
        cities = {"city": ["Bonn", "Oslo", "Rome"]}
        first = traits(columns=["city", "a", "b"], categories=cities)
        assert not differing(first, traits(columns=["a", "b", "city"], categories=cities))


def test_without_pyarrow_the_error_names_the_extra(tmp_path, monkeypatch) -> None:
    """Nothing else of the package needs it."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InvalidParamsError, match=r"needs pyarrow.*its extra `tables`"):
        table(tmp_path)


@pytest.mark.parametrize("version", ["20.0.0", "21.0.0.dev3", "9.0.0"])
def test_an_old_pyarrow_is_refused(tmp_path, monkeypatch, version) -> None:
    """Up to 21 it loses rows by a filter with decimals, without a word."""
    folder = numbered(tmp_path, [8], 8)
    monkeypatch.setattr(pa, "__version__", version)
    said = rf"pyarrow 22 or newer, and {re.escape(version)} is installed.*'pyarrow>=22'"
    with pytest.raises(InvalidParamsError, match=said):
        table(folder)
    monkeypatch.setattr(pa, "__version__", "22.0.0")
    assert len(table(folder)) == 8


def test_a_training_in_one_process(tmp_path) -> None:
    """Through ctx.loader and ctx.steps: each row once an epoch."""
    rows = table(numbered(tmp_path, [30], 4), features=["half"], target="number")
    seen = []
    with RankContext.local() as ctx:
        for x, y in ctx.steps(ctx.loader(rows, global_batch_size=8), epochs=2):
            assert torch.equal(x[:, 0] * 2, y.float())
            seen += y.tolist()
    assert sorted(seen) == sorted([*range(30)] * 2)


DUCKDB = Path(__file__).parents[3] / "data/duckdb.parquet"


@pytest.mark.parametrize("has_copy", [False, True], ids=["in place", "local copy"])
def test_a_file_of_duckdb_is_read(has_copy: bool, tmp_path: Path) -> None:
    """HUGEINT is float64 there and ENUM a text; its row groups and encodings are its own."""
    rows = table(
        DUCKDB,
        columns=["id", "huge", "large", "city", "flag", "gaps"],
        categories=["city"],
        fill={"gaps": -1},
        local_copy=tmp_path if has_copy else False,
    )
    assert rows.categories == {"city": ("Bern", "Oslo", "Rome")}
    batches = list(loader_of(rows, 1000, seed=3))
    batch = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
    ids = batch["id"]
    assert not torch.equal(ids, torch.arange(5000))
    assert torch.equal(ids.sort().values, torch.arange(5000))
    assert torch.equal(batch["huge"], (ids % 50).double())
    assert torch.equal(batch["large"], ids % 128)
    assert torch.equal(batch["city"], torch.tensor([1, 2, 0])[ids % 3])
    assert torch.equal(batch["flag"], ids % 2 == 0)
    assert torch.equal(batch["gaps"], torch.where(ids % 5 == 0, -1, ids % 7).to(torch.int8))


def test_filters_read_what_duckdb_counted_in_its_row_groups() -> None:
    """Dates and decimals can be filtered by, though they can't be read."""
    filters = [("day", ">=", dt.date(2020, 2, 10)), ("city", "==", "Rome")]
    ids = only_batch(table(DUCKDB, columns=["id"], filters=filters))["id"]
    assert ids.tolist() == [n for n in range(4000, 5000) if n % 3 == 1]
    cheap = [
        ("price", "<", decimal.Decimal("0.5")),
        ("at_s", "<", dt.datetime.fromisoformat("2020-01-02")),
    ]
    assert only_batch(table(DUCKDB, columns=["id"], filters=cheap))["id"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "says"),
    [("price", "decimal128.*cents"), ("day", "date32.*hour"), ("at_s", "timestamp.*hour")],
)
def test_types_of_duckdb_that_are_no_tensors_are_refused_by_name(name: str, says: str) -> None:
    """The error names the file and the column, and says what to do instead."""
    with pytest.raises(InvalidParamsError, match=f"column {name} of .*duckdb.parquet is {says}"):
        table(DUCKDB, columns=[name])
