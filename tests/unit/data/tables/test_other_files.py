"""A training that resumes in the middle of an epoch of files that were replaced since."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from prefect_torch_ddp import RankContext, read_ledger
from prefect_torch_ddp.data import table
from tests.unit.data.tables.parquet_files import numbered, write

WARNING = "from the middle of an epoch of 16 samples"


class KilledError(Exception):
    """Ends a training in the middle of an epoch."""


def train(
    folder: Path, given: dict[str, Any], dies_at: int | None = None, files: Any = None
) -> list[list[int]]:
    """Train two epochs of four steps on a table; return the numbers of each batch."""
    seen = []
    rows = table(files or folder / "table", **given)
    saves = {"every_steps": 1, "every_s": None}
    with RankContext.local(storage=folder / "storage", checkpoint=saves, ledger=True) as ctx:
        model = torch.nn.Linear(1, 1)
        ctx.track(model=model)
        for batch in ctx.steps(ctx.loader(rows, global_batch_size=4), epochs=2):
            seen.append(sorted(batch["number"].tolist()))
            if ctx.step == dies_at:
                raise KilledError
    return seen


def rename(folder: Path) -> None:
    """Let the first file be the last one."""
    (folder / "000.parquet").rename(folder / "zzz.parquet")


def replace(folder: Path) -> None:
    """Put as many rows into a file, which take other bytes."""
    columns = {"number": [7] * 8, "half": pa.array([0.5] * 8, pa.float32())}
    write(folder / "001.parquet", columns, row_group_size=8)


def replace_by_the_same_size(folder: Path) -> None:
    """Put a file of as many bytes and rows in the place of another."""
    before = (folder / "001.parquet").stat().st_size
    columns = {"number": pa.array(range(20, 28), pa.int64())}
    columns["half"] = pa.array([n / 2 for n in range(20, 28)], pa.float32())
    write(folder / "001.parquet", columns, row_group_size=8)
    assert (folder / "001.parquet").stat().st_size == before


@pytest.mark.parametrize("copies", [False, True], ids=["in windows", "a local copy"])
@pytest.mark.parametrize("change", [rename, replace, replace_by_the_same_size])
def test_the_rest_of_the_epoch_is_left_out(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], None],
    *,
    copies: bool,
) -> None:
    """Row counts are equal, and still some rows would be used twice and others never."""
    given = {"local_copy": tmp_path / "copies"} if copies else {}
    folder = numbered(tmp_path / "table", [8, 8], 8)
    with pytest.raises(KilledError):
        train(tmp_path, given, dies_at=3)
    change(folder)
    assert len(train(tmp_path, given)) == 4
    (said,) = [each for each in caplog.messages if WARNING in each]
    assert "files with the digest" in said.partition("but the loader has")[0]
    assert "that epoch can't be finished, and the next one begins" in said
    assert not read_ledger(tmp_path / "storage", "local").is_clean


@pytest.mark.parametrize("copies", [False, True], ids=["in windows", "a local copy"])
def test_files_that_were_moved_are_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, copies: bool
) -> None:
    """Names count below the table's folder, and no ETag does."""
    given = {"local_copy": tmp_path / "copies"} if copies else {}
    numbered(tmp_path / "one/table", [8, 8], 8)
    with pytest.raises(KilledError):
        train(tmp_path / "one", given, dies_at=3)
    (tmp_path / "one").rename(tmp_path / "other")
    for file in (tmp_path / "other/table").iterdir():  # as a copy has it
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)
    train(tmp_path / "other", given)
    assert not [each for each in caplog.messages if WARNING in each]
    assert read_ledger(tmp_path / "other/storage", "local").is_clean


@pytest.mark.parametrize("copies", [False, True], ids=["in windows", "a local copy"])
def test_the_order_of_a_list_of_files_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, copies: bool
) -> None:
    """Files of two folders may have equal names and equal bytes."""
    given = {"local_copy": tmp_path / "copies"} if copies else {}
    numbered(tmp_path / "one/a", [8], 8)
    numbered(tmp_path / "one/b", [8], 8)

    def files(below: str, *folders: str) -> list[Path]:
        return [tmp_path / below / each / "000.parquet" for each in folders]

    with pytest.raises(KilledError):
        train(tmp_path, given, dies_at=3, files=files("one", "a", "b"))
    (tmp_path / "one").rename(tmp_path / "other")
    with pytest.raises(KilledError):  # a step of the epoch is left
        train(tmp_path, given, dies_at=4, files=files("other", "a", "b"))
    assert not [each for each in caplog.messages if WARNING in each]
    with pytest.raises(KilledError):
        train(tmp_path, given, dies_at=6, files=files("other", "a", "b"))
    train(tmp_path, given, files=files("other", "b", "a"))
    assert [each for each in caplog.messages if WARNING in each]
