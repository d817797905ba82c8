"""What Dask workers compute in tests, so it loads no torch."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd

from tests.support.waiting import wait_until
from tests.workloads import write_pid

NUM_ROWS = 100
META = {"number": "int64", "half": "float32", "kind": "object"}


def part(number: int, dies_in: str | None = None) -> pd.DataFrame:
    """Return a partition; the first worker that computes number 3 dies of it. Number 2 is empty."""
    if dies_in is not None and number == 3:
        mark = Path(dies_in) / "died"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    numbers = np.arange(NUM_ROWS * number, NUM_ROWS * (number + (number != 2)))
    kinds = np.array(["even", "odd"], dtype=object)[numbers % 2]
    half = (numbers / 2).astype("float32")
    return pd.DataFrame({"number": numbers, "half": half, "kind": kinds})


def held_part(number: int, folder: str) -> pd.DataFrame:
    """Leave the pid in `begun-<number>`; return a partition once the folder has `release`, or
    a file `let-<i>`, each of which lets only one of them end."""
    write_pid(folder, f"begun-{number}")
    wait_until(lambda: (Path(folder) / "release").exists() or _took_one(folder))
    return part(number)


def _took_one(folder: str) -> bool:
    for path in Path(folder).glob("let-*"):
        with suppress(FileNotFoundError):  # another partition was faster
            path.unlink()
            return True
    return False


def failing_part(number: int) -> pd.DataFrame:
    """Fail in one partition."""
    if number == 1:
        msg = "partition 1 can't be cleaned"
        raise ValueError(msg)
    return part(number)


def deadly_part(number: int) -> pd.DataFrame:
    """Kill every worker that computes number 1."""
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return part(number)


def grid(number: int, dies_in: str | None = None) -> np.ndarray:
    """Return four times of a small grid, with a NaN; the first worker at number 1 may die of it."""
    if dies_in is not None and number == 1:
        mark = Path(dies_in) / "died"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    values = np.arange(4 * 6 * 8, dtype="float32").reshape(4, 6, 8) + 4 * 6 * 8 * number
    if number == 2:
        values[0, 0, 0] = np.nan
    return values


def grids(dies_in: str | None = None):
    """Return a Dataset of xarray that Dask computes: 14 times in four blocks of at most 4."""
    import dask.array as da
    import xarray as xr
    from dask.delayed import delayed

    make = delayed(grid, pure=True)
    parts = [da.from_delayed(make(i, dies_in), (4, 6, 8), "float32") for i in range(4)]
    times = np.datetime64("2020-01-01", "ns") + np.arange(14) * np.timedelta64(6, "h")
    t2m = xr.DataArray(
        da.concatenate(parts)[:14],
        {"time": times, "lat": np.linspace(70, 0, 6)},
        ("time", "lat", "lon"),
        attrs={"units": "K"},
    )
    sea = xr.DataArray(np.eye(6, 8, dtype=bool), dims=("lat", "lon"))
    t2m.encoding = {"chunks": (2, 6, 8), "compressor": "of another format"}
    doubled = (t2m.fillna(0) * 2).astype("int32")
    return xr.Dataset({"t2m": t2m, "doubled": doubled, "sea": sea})
