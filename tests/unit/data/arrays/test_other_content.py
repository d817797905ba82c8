"""A training that resumes in the middle of an epoch of arrays that were replaced since."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from prefect_torch_ddp import RankContext, read_ledger
from prefect_torch_ddp.data import array
from tests.unit.data.arrays.array_files import weather

WARNING = "from the middle of an epoch of 16 samples"
YEAR = {"select": {"time": slice("2020-01-01", "2020-01-16")}}


class KilledError(Exception):
    """Ends a training in the middle of an epoch."""


def train(folder: Path, where: Any, dies_at: int | None = None, **given: Any) -> int:
    """Train an epoch of four steps on arrays; return the number of steps made."""
    num_steps = 0
    samples = array(where, **given)
    saves = {"every_steps": 1, "every_s": None}
    with RankContext.local(storage=folder / "storage", checkpoint=saves, ledger=True) as ctx:
        model = torch.nn.Linear(1, 1)
        ctx.track(model=model)
        for _ in ctx.steps(ctx.loader(samples, global_batch_size=4), epochs=1):
            num_steps += 1
            if ctx.step == dies_at:
                raise KilledError
    return num_steps


def write(store: Path, values: Any, zarr_format: int = 3) -> None:
    """Write a store in chunks of four times, in the place of another."""
    shutil.rmtree(store, ignore_errors=True)
    encoding = {"t2m": {"chunks": (4, 8, 6)}}
    values.to_zarr(store, zarr_format=zarr_format, consolidated=False, encoding=encoding)


def other_values(store: Path) -> None:
    """Put as many values in the place of others."""
    values = weather()
    values["t2m"] = values["t2m"] * 3 % 7
    write(store, values)


def other_coordinates(store: Path) -> None:
    """Let the same values be of other places."""
    values = weather()
    write(store, values.assign_coords(lon=values.lon + 1))


def another_scale(store: Path) -> None:
    """Have the chunks decoded to other values."""
    zarr.open_group(store)["t2m"].attrs["scale_factor"] = 2.0


def other_chunk_outside(store: Path) -> None:
    """Change what no sample has, as if the store had grown."""
    values = weather(times=40)
    values["t2m"][17:] = 0
    write(store, values)


def moved(store: Path) -> None:
    """Have each file written anew in its place."""
    for file in [path for path in store.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        (other_values, True),
        (other_coordinates, True),
        (another_scale, True),
        (other_chunk_outside, False),
        (moved, False),
    ],
)
def test_zarr_of_other_content_isnt_continued(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], None],
    *,
    is_other: bool,
) -> None:
    """Shapes and chunks are equal, and still some samples would be used twice."""
    write(tmp_path / "a.zarr", weather())
    with pytest.raises(KilledError):
        train(tmp_path, tmp_path / "a.zarr", dies_at=3, **YEAR)
    change(tmp_path / "a.zarr")
    (tmp_path / "a.zarr").rename(tmp_path / "b.zarr")
    assert train(tmp_path, tmp_path / "b.zarr", **YEAR) == (0 if is_other else 2)
    assert is_other == bool([each for each in caplog.messages if WARNING in each])
    assert read_ledger(tmp_path / "storage", "local").is_clean is not is_other


@pytest.mark.parametrize("name", ["a.npy", "parts/part-0.npy"])
def test_npy_of_other_values_isnt_continued(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Files of NumPy's have one size, whatever is in them."""
    (tmp_path / "parts").mkdir()
    where = tmp_path / name if name == "a.npy" else tmp_path / "parts"
    np.save(tmp_path / name, np.arange(16.0))
    with pytest.raises(KilledError):
        train(tmp_path, where, dies_at=2)
    with pytest.raises(KilledError):
        train(tmp_path, where, dies_at=3)
    assert not [each for each in caplog.messages if WARNING in each]
    np.save(tmp_path / name, np.arange(16.0)[::-1].copy())
    assert train(tmp_path, where) == 0
    assert [each for each in caplog.messages if WARNING in each]
