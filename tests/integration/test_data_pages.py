"""The programs of the pages on tables, arrays and collections run as they stand there, but for
their data."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.integration.test_manual import COMMAND_S, DOCS, blocks_of, write_program
from tests.integration.test_wheel import run

xr = pytest.importorskip("xarray")
pytest.importorskip("zarr")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part"),
]


def write_trips(folder: Path) -> int:
    """Write Parquet files in which some rows have nulls or no distance; return how many are for
    the test."""
    folder.mkdir()
    generator, num_test = np.random.default_rng(0), 0
    for number in range(3):
        distance = generator.integers(0, 9, 2000).astype("float64")
        columns = {
            "distance": distance,
            "hour": generator.integers(0, 24, 2000),
            "passengers": generator.integers(1, 5, 2000),
            "fare": np.where(distance == 8, np.nan, 3 + 2 * distance),
            "remark": ["not read"] * 2000,
            "is_test": generator.random(2000) < 0.2,
        }
        frame = pd.DataFrame(columns)
        frame.to_parquet(folder / f"{number}.parquet")
        num_test += int((frame.is_test & (distance > 0) & (distance < 8)).sum())
    return num_test


def write_fields(store: Path) -> int:
    """Write hourly fields of 11 days in 2015 and 10 in 2016, in chunks that end in the midst of a
    day; return how many values the windows of six days foretell."""
    times = np.datetime64("2015-12-21", "ns") + np.arange(21 * 24) * np.timedelta64(1, "h")
    places = {"lat": np.linspace(90, -90, 64), "lon": np.arange(0, 360, 360 / 128)}
    values = np.random.default_rng(0).normal(size=(len(times), 64, 128)).astype("float32")
    t2m = xr.DataArray(values, {"time": times, **places}, ("time", "lat", "lon"))
    fields = xr.Dataset({"t2m": t2m, "not_used": t2m[0]})
    fields.to_zarr(store, encoding={"t2m": {"chunks": (100, 64, 128)}})
    return (10 - 5) * 64 * 128


def test_the_program_on_collections_trains_on_an_argument(tmp_path: Path) -> None:
    """The flow prints the last loss, and the dataset is in the storage."""
    write_trips(tmp_path / "trips")
    _, program = blocks_of(DOCS / "collections.md")[0]
    for named, ours in (("/data/trips", "trips"), ("/shared/runs", "runs")):
        assert program.count(f'"{named}"') == 1
        program = program.replace(named, str(tmp_path / ours))
    name = write_program(program, tmp_path)
    said = run(sys.executable, name, folder=tmp_path, timeout_s=COMMAND_S)
    assert re.search(r"^\d+\.\d+$", said, re.MULTILINE), said
    assert len(list((tmp_path / "runs/datasets").glob("*/manifest.json"))) == 1


@pytest.mark.parametrize(
    ("page", "source", "write"),
    [("tables", "/data/trips", write_trips), ("arrays", "/data/era5.zarr", write_fields)],
    ids=["tables", "arrays"],
)
def test_the_program_of_a_page_trains_on_what_dask_prepares(
    page: str, source: str, write: Callable[[Path], int], tmp_path: Path
) -> None:
    """Every test sample is scored, and nothing else."""
    (tmp_path / "data").mkdir()
    num_test = write(tmp_path / source[1:])
    _, program = blocks_of(DOCS / f"{page}.md")[0]
    assert program.count(f'"{source}"') == 1
    name = write_program(program.replace(source, str(tmp_path / source[1:])), tmp_path)
    said = run(sys.executable, name, folder=tmp_path, timeout_s=COMMAND_S)
    assert re.search(rf"rmse \d.* on {num_test:,} samples$", said), said
