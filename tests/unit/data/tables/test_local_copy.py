"""A table's local copy: the same rows as from the files, decoded once, any of them at any time."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, StackDataset, Subset, TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data import table
from prefect_torch_ddp.data.images import cache
from prefect_torch_ddp.data.tables import local_copy, parquet_files
from prefect_torch_ddp.data.tables import pieces as tables_pieces
from prefect_torch_ddp.data.traits import differing
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import ListedObject, ObjectPart
from tests.unit.data.tables.parquet_files import numbered, virtual_shares, walk, write
from tests.unit.data.tables.test_table import Counted, only_batch
from tests.unit.data.test_loader import loader_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep copies below the test's folder, and have pieces of a few rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tables_pieces, "PIECE_ROWS", 8)


def copies(tmp_path: Path) -> set[Path]:
    """Return the copies, and whatever unfinished ones are left."""
    root = tmp_path / "home/prefect-torch-ddp/tables"
    found = {*root.glob("*"), *root.glob(".staging/*")} - {root / ".staging"}
    return {path for path in found if path.suffix != ".lock"}


def tensors_of(batch: Any) -> dict[Any, torch.Tensor]:
    """Return the tensors of a batch of any form, in their order."""
    if isinstance(batch, torch.Tensor):
        return {0: batch}
    return dict(batch) if isinstance(batch, Mapping) else dict(enumerate(batch))


@pytest.fixture
def varied(tmp_path: Path) -> Path:
    """Write three files: of other orders and widths, with texts, nulls, and one without rows."""
    trees = ["oak", None, "ash", "oak", "elm"]
    one = {"n": pa.array([1, 2, None, 4, 5], pa.int16()), "tree": trees, "f": [0.5, None, 2, 3, 4]}
    one |= {"flag": [True, False, True, True, False], "more": [[1], [2], [], [4], [5]]}
    folder = tmp_path / "varied"
    write(folder / "a.parquet", one, row_group_size=2)
    two = {"flag": [False] * 9, "f": pa.array([0.1] * 9, pa.float32()), "n": [2**40, *range(8)]}
    frame = pd.DataFrame({**two, "tree": pd.Categorical(["elm", "ash", "elm"] * 3)})
    frame.to_parquet(folder / "b.parquet", row_group_size=4)
    none = {"flag": pa.bool_(), "f": pa.float64(), "n": pa.int64(), "tree": pa.string()}
    write(folder / "c.parquet", {name: pa.array([], type_) for name, type_ in none.items()})
    return folder


FILL = {"n": -1, "f": 9.0, "tree": "oak"}
FILLED = {"f": 0, "tree": "elm"}
TREES = {"tree": ["oak", "elm", "ash"]}
NAMES = ["n", "tree", "f", "flag"]


@pytest.mark.parametrize(
    "asked",
    [
        {"columns": NAMES, "categories": TREES, "fill": FILL},
        {"columns": NAMES, "categories": ["tree"], "fill": FILL},
        {"features": ["f", "flag"], "target": "n", "fill": {"f": 1.0, "n": 0}},
        {"features": ["f"], "target": ["flag", "tree"], "categories": TREES, "fill": FILLED},
        {"features": ["n", "flag"], "fill": {"n": 7}},
        {
            "columns": ["n"],
            "filters": [[("n", ">", 3)], [("tree", "in", {"ash"})]],
            "fill": {"n": 0},
        },
    ],
    ids=["columns", "categories read", "one target", "two targets", "no target", "filters"],
)
def test_a_copy_has_the_batches_of_the_files(asked, varied) -> None:
    """Of every form: names, dtypes, shapes, values; nulls are filled and texts are codes."""
    windowed, copied = table(varied, **asked), table(varied, **asked, local_copy=True)
    assert len(copied) == len(windowed)
    assert copied.categories == windowed.categories
    whole = only_batch(windowed)
    expected = tensors_of(whole)
    some = [3, 0, len(copied) - 1]
    drawn = loader_of(copied, 3, order=lambda _: some)
    for batch, rows in ((only_batch(copied), slice(None)), (next(iter(drawn)), some)):
        assert type(batch) is type(whole)
        found = tensors_of(batch)
        assert list(found) == list(expected)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name][rows])
            assert tensor.dtype == expected[name].dtype
            assert tensor.is_contiguous()


def test_rows_that_pass_no_filter_are_left_out_of_a_copy(tmp_path, monkeypatch) -> None:
    """Also if none of those that are decoded at once passes, but others of their row group do."""
    monkeypatch.setattr(parquet_files, "ROWS_AT_ONCE", 10)
    folder = numbered(tmp_path / "t", [40], 40)
    rows = table(folder, filters=[("number", "in", [3, 25])], local_copy=True)
    assert only_batch(rows)["number"].tolist() == [3, 25]


@pytest.mark.parametrize("shuffle", [True, False])
def test_all_rows_are_shuffled_as_those_of_any_map_style_dataset(shuffle, tmp_path) -> None:
    """The sampler's order, on any number of ranks, from any batch."""
    rows = table(numbered(tmp_path / "t", [70, 0, 80], 5), local_copy=True)
    numbers = TensorDataset(torch.arange(150))
    whole = walk(rows, 16, 1, epoch=1, shuffle=shuffle)
    steps = loader_of(numbers, 16, shuffle=shuffle).lockstep(1)
    assert whole == [batch.tolist() for (batch,), _ in steps]
    for world, start in ((2, 0), (4, 5), (3, 9)):
        assert walk(rows, 16, world, epoch=1, start=start, shuffle=shuffle) == whole[start:]


def test_elastic_shares_are_the_same_on_any_number_of_ranks(tmp_path) -> None:
    """Each virtual rank has its rows, wherever it is."""
    rows = table(numbered(tmp_path / "t", [50, 41], 5), local_copy=True)
    found = virtual_shares(rows, 13, 4)
    assert virtual_shares(rows, 13, 1) == virtual_shares(rows, 13, 2) == found
    assert sorted(n for step in found for share in step for n in share) == list(range(91))


def test_rows_can_be_taken_one_by_one_chosen_weighted_and_ordered(tmp_path) -> None:
    """By an index, torch's Subset, of a Subset too, `weights` and `order` of a loader."""
    rows = table(numbered(tmp_path / "t", [20, 20], 5), local_copy=True)
    assert [rows[i]["number"].item() for i in (0, -1, np.int64(7))] == [0, 39, 7]
    for wrong in (40, -41):
        with pytest.raises(IndexError):
            rows[wrong]
    with pytest.raises(TypeError):
        rows[0.5]
    inner = Subset(Subset(rows, range(10, 30)), torch.tensor([3, 0, 19]))
    assert [batch["number"].tolist() for batch in loader_of(inner, 2, shuffle=False)] == [
        [13, 10],
        [29],
    ]
    weights = torch.zeros(40)
    weights[[4, 9]] = 1.0
    drawn = walk(rows, 8, 2, weights=weights)
    assert drawn == walk(rows, 8, 4, weights=weights)
    assert {n for batch in drawn for n in batch} == {4, 9}
    assert walk(rows, 2, 2, order=lambda epoch: [5, 3, epoch, 5]) == [[5, 3], [0, 5]]


@pytest.mark.parametrize("asked", [{}, {"features": ["half"], "target": "number"}])
def test_torchs_own_datasets_and_loader_get_samples(asked, tmp_path) -> None:
    """A sample is what default_collate makes the table's batch of."""
    rows = table(numbered(tmp_path / "t", [20], 5), **asked, local_copy=True)
    expected = tensors_of(only_batch(rows))
    (batch,) = DataLoader(rows, batch_size=20)
    assert all(torch.equal(each, expected[name]) for name, each in tensors_of(batch).items())
    stacked = StackDataset(rows, torch.arange(20) * 2)
    for found, doubled in (*DataLoader(stacked, 20), *loader_of(stacked, 20, shuffle=False)):
        assert all(torch.equal(each, expected[name]) for name, each in tensors_of(found).items())
        assert doubled.tolist() == list(range(0, 40, 2))


def test_collate_fn_is_given_the_batch_of_tensors(tmp_path) -> None:
    """As by a table that is read in windows; of a Subset too."""
    rows = table(numbered(tmp_path / "t", [64], 8), ["number"], local_copy=True)
    for dataset in (rows, Subset(rows, range(64))):
        doubled = loader_of(dataset, 16, collate_fn=lambda batch: batch["number"] * 2)
        assert sorted(n for batch in doubled for n in batch.tolist()) == list(range(0, 128, 2))


def test_a_copy_is_made_once_and_again_if_anything_changes(tmp_path) -> None:
    """A second call reads not even a footer; a new file or another argument gives another copy."""
    folder = numbered(tmp_path / "t", [30], 5)
    reads: list[ObjectPart] = []
    source = Counted(DirectoryStorage(folder), reads)
    first = table(source, local_copy=True)
    assert reads
    reads.clear()
    again = table(source, local_copy=True)
    assert (again.folder, reads) == (first.folder, [])
    folders = {first.folder}
    for asked in (
        {"columns": ["number"]},
        {"features": ["number"]},
        {"features": ["half"], "target": "number"},
        {"fill": {"half": 1}},
        {"fill": {"half": 1.0}},
        {"filters": [("number", "<", 20)]},
        {"filters": [("number", "in", np.arange(29))]},
        {"filters": [("number", "in", np.arange(28))]},
    ):
        folders.add(table(source, **asked, local_copy=True).folder)
    assert len(folders) == 9
    numbered(folder, [31], 5)
    changed = table(source, local_copy=True)
    assert len(changed) == 31
    assert copies(tmp_path) == {*folders, changed.folder}
    elsewhere = table(source, local_copy=tmp_path / "disk")
    assert elsewhere.folder == tmp_path / "disk" / changed.folder.name


def test_equal_sets_in_filters_have_the_same_copy(tmp_path) -> None:
    """Although their order may differ, as that of texts does between processes."""
    folder = numbered(tmp_path / "t", [30], 5)
    among = {1000, 3}, set(range(2000))
    among[1].difference_update({*range(2000)} - among[0])
    assert among[0] == among[1]
    assert [*among[0]] != [*among[1]]
    asked = ([("number", "in", each)] for each in among)
    assert len({table(folder, filters=each, local_copy=True).folder for each in asked}) == 1


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"columns": ["f"]}, r"column f of .*a\.parquet.* has 1 nulls"),
        (
            {"columns": ["tree"], "categories": {"tree": ["oak"]}, "fill": {"tree": "oak"}},
            r"column tree of .* has the value '(ash|elm)'",
        ),
        ({"columns": ["more"]}, "column more of .* flatten"),
        ({"columns": ["n"], "filters": [("n", "<", -9)]}, "no row passes"),
        ({"columns": ["n"], "shuffle_buffer": 10}, "shuffle_buffer has no effect"),
    ],
    ids=["null", "text", "list", "no row", "buffer"],
)
def test_what_the_files_refuse_a_copy_refuses_and_nothing_is_left(
    asked, what, varied, tmp_path
) -> None:
    """When the table is opened: by file and column."""
    with pytest.raises(InvalidParamsError, match=what):
        table(varied, **asked, local_copy=True)
    assert copies(tmp_path) == set()


def test_a_file_that_cant_be_decoded_leaves_no_copy(tmp_path) -> None:
    """The error names it."""
    folder = numbered(tmp_path / "t", [40], 10)
    body = bytearray((folder / "000.parquet").read_bytes())
    body[4:80] = bytes(76)
    (folder / "000.parquet").write_bytes(body)
    with pytest.raises(StorageError, match=r"000\.parquet can't be decoded"):
        table(folder, local_copy=True)
    assert copies(tmp_path) == set()


def test_a_folder_that_cant_be_used_is_refused(tmp_path, monkeypatch) -> None:
    """An empty path, one below a file, another user's copy, and files without an ETag."""
    folder = numbered(tmp_path / "t", [4], 2)
    with pytest.raises(InvalidParamsError, match="local_copy is an empty path"):
        table(folder, local_copy="")
    with pytest.raises(
        StorageError, match=r"can't keep a copy .*: Not a directory; .*another folder"
    ):
        table(folder, local_copy=folder / "000.parquet" / "x")
    table(folder, local_copy=True)
    with monkeypatch.context() as patch, pytest.raises(InvalidParamsError, match="another user"):
        patch.setattr(os, "geteuid", lambda: -1)
        table(folder, local_copy=True)
    found = [(DirectoryStorage(folder), ListedObject("000.parquet", 9, ""))]
    with pytest.raises(InvalidParamsError, match=r"t/000\.parquet has no ETag"):
        local_copy.open_copy(tmp_path / "home", found, {}, lambda: pytest.fail("it was read"))


def test_a_copy_that_doesnt_fit_the_disk_is_refused_before_it_is_written(
    tmp_path, monkeypatch
) -> None:
    """With the bytes that it takes, those that are free, and the ways out."""
    folder = numbered(tmp_path / "t", [30], 5)
    monkeypatch.setattr(cache, "KEPT_FREE_PART", 1)
    monkeypatch.setattr(cache, "KEPT_FREE_BYTES", 2**62)
    says = r"takes 360 bytes, and in .*home.* 0 bytes are free .*leave local_copy out, which shuf"
    with pytest.raises(InvalidParamsError, match=says):
        table(folder, local_copy=True)
    assert copies(tmp_path) == set()


def test_copies_that_nobody_uses_are_removed_to_make_room(tmp_path, monkeypatch) -> None:
    """The longest unused one goes first; one that is open stays, in this process too."""
    folder = numbered(tmp_path / "t", [30], 5)
    used = table(folder, ["number"], local_copy=True)
    old, new = (
        table(folder, ["half"], filters=[("number", "<", n)], local_copy=True).folder
        for n in (10, 20)
    )
    for path, at in ((old, 100), (new, 200), (used.folder, 50)):
        os.utime(path / "copy.json", (at, at))
    room = iter([0, 119, 121, 121])
    monkeypatch.setattr(local_copy, "room_on_disk", lambda _: next(room))
    made = table(folder, ["half"], local_copy=True)
    # 119 bytes were too few after `used`, which stays; 121 were enough once `old` was gone.
    assert copies(tmp_path) == {used.folder, new, made.folder}
    assert only_batch(used)["number"].tolist() == list(range(30))


@pytest.mark.parametrize("damage", ["cut", "missing", "garbage"])
def test_a_damaged_copy_is_made_again(damage, tmp_path) -> None:
    """A copy whose files somebody changed is replaced."""
    folder = numbered(tmp_path / "t", [30], 5)
    path = table(folder, local_copy=True).folder / "0.npy"
    if damage == "cut":
        os.truncate(path, path.stat().st_size - 8)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"nonsense")
    assert only_batch(table(folder, local_copy=True))["number"].tolist() == list(range(30))
    assert copies(tmp_path) == {path.parent}


def test_ranks_whose_copies_differ_are_told_apart(tmp_path) -> None:
    """By some rows, which a loop compares before its first step."""
    one, other = numbered(tmp_path / "a", [30], 5), numbered(tmp_path / "b", [1, 30], 5)
    (other / "000.parquet").unlink()
    traits = [loader_of(table(each, local_copy=True), 4).traits for each in (one, other, one)]
    assert differing(traits[0], traits[1]) in {"dataset.blocks[0]", "dataset.blocks[1]"}
    assert differing(traits[0], traits[2]) is None


def test_a_training_in_one_process(tmp_path) -> None:
    """Through ctx.loader and ctx.steps: each row once an epoch."""
    folder = numbered(tmp_path / "t", [30], 4)
    rows = table(folder, features=["half"], target="number", local_copy=True)
    seen = []
    with RankContext.local() as ctx:
        for x, y in ctx.steps(ctx.loader(rows, global_batch_size=8), epochs=2):
            assert torch.equal(x[:, 0] * 2, y.float())
            seen += y.tolist()
    assert sorted(seen) == sorted([*range(30)] * 2)
