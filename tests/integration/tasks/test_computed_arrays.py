"""Workers write a Zarr group that Dask computes, which is complete or absent, and `array` reads
it."""

import logging
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from prefect_torch_ddp import InvalidParamsError
from prefect_torch_ddp.data import array
from prefect_torch_ddp.data.arrays.statistics import Statistics, statistics_in, statistics_key
from prefect_torch_ddp.data.datasets.dataset_store import (
    find_dataset,
    local_dataset,
    published_dataset,
)
from prefect_torch_ddp.protocol.prepared import LazyDataset
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.gangs.computed import publish_computed
from tests.support.gangs import own_cluster
from tests.unit.data.test_loader import loader_of
from tests.workloads.dask_parts import grids

xr = pytest.importorskip("xarray")
da = pytest.importorskip("dask.array")
pytestmark = pytest.mark.timeout(200)
logger = logging.getLogger("test")


def lazy(collection) -> LazyDataset:
    """Return a collection as a rank sends it."""
    kind = f"{type(collection).__module__}.{type(collection).__name__}"
    return LazyDataset(kind, "arrays", cloudpickle.dumps(collection))


def check_dataset(storage, num_files: int) -> None:
    """Compare the published dataset with what Dask computes here."""
    expected = grids().compute(scheduler="sync")
    read = xr.open_zarr(local_dataset(storage, "d"), consolidated=False, chunks=None)
    xr.testing.assert_identical(read.load(), expected)
    where = published_dataset(storage, "d")
    for name in ("t2m", "doubled"):
        values = expected[name].values.astype("float64")
        key = statistics_key(name)
        found = Statistics.from_bytes(where.read(key), key)
        finite = values[np.isfinite(values)]
        assert found.num_values == finite.size
        assert found.num_not_finite == values.size - finite.size
        assert [found.mean, found.std] == pytest.approx([finite.mean(), finite.std()])
        assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    assert len(list(storage.list("datasets/d/files"))) == num_files
    samples = array(where, "t2m", nan=0.0)
    (batch,) = loader_of(samples, len(samples), shuffle=False)
    assert np.array_equal(batch["t2m"].numpy(), np.nan_to_num(expected["t2m"].values))


def test_blocks_become_a_zarr_group(storage, client, caplog) -> None:
    """Values, coordinates and attributes are those of the collection; earlier datasets stay."""
    caplog.set_level(logging.INFO)
    made = publish_computed(client, storage, "d", lazy(grids()), logger)
    # Chunks: 7 of t2m, as its encoding says; 4 of doubled, as Dask has it; 3 in memory.
    # Metadata of the group and of 5 variables, and two statistics.
    assert made.num_files == 7 + 4 + 3 + 6 + 2
    check_dataset(storage, made.num_files)
    assert "prepared 8 of 8 blocks" in caplog.text
    again = publish_computed(client, storage, "d", lazy(grids() * 2), logger)
    assert again == made
    check_dataset(storage, made.num_files)


@pytest.mark.extended
def test_a_killed_worker_costs_only_its_blocks(tmp_path) -> None:
    """The lost blocks are computed again; what another worker wrote of them stays."""
    storage = DirectoryStorage(tmp_path / "store")
    options = {"scheduler_kwargs": {"allowed_failures": 0}}
    with own_cluster(2, **options) as (_, client):
        made = publish_computed(client, storage, "d", lazy(grids(str(tmp_path))), logger)
    assert (tmp_path / "died").exists()
    check_dataset(storage, made.num_files)


@pytest.mark.parametrize(("name", "given"), [("values", None), ("n", "n")])
def test_an_array_of_dask_and_a_dataarray_are_written(name, given, client, tmp_path) -> None:
    """Each becomes a group with one variable, `values` if it has no name."""
    storage = DirectoryStorage(tmp_path)
    numbers = da.arange(40, chunks=8).reshape(10, 4)
    if given is not None:
        numbers = xr.DataArray(numbers, dims=("x", "y"), name=given)
    publish_computed(client, storage, "d", lazy(numbers), logger)
    samples = array(local_dataset(storage, "d"))
    (batch,) = loader_of(samples, 10, shuffle=False)
    assert batch[name].tolist() == np.arange(40).reshape(10, 4).tolist()


PACKED = {"dtype": "int16", "scale_factor": 0.1, "_FillValue": -32768}


def packed(values, encoding=PACKED):
    """Return values of Dask with an encoding, as xarray's operations inherit it from a file."""
    found = xr.DataArray(values, dims=("x",), name="t2m")
    found.encoding = dict(encoding)
    return found


def test_values_that_fit_their_packing_are_packed(client, tmp_path) -> None:
    """They come back as they were computed, and take two bytes each."""
    storage = DirectoryStorage(tmp_path)
    values = np.array([1.5, np.nan, -3276.7, 0.1, 7.0, 1e3], "float32")
    computed = packed(da.from_array(values, chunks=2)), packed(values).rename("mask")
    days = xr.DataArray(
        da.from_array(np.datetime64("2000-01-01T12", "ns") + np.arange(6), chunks=2), dims="x"
    )
    days.encoding = {"units": "days since 1990-01-01", "dtype": "int32"}
    dataset = xr.merge([*computed, days.astype("datetime64[D]").astype("M8[ns]").rename("day")])
    dataset["day"].encoding = days.encoding
    publish_computed(client, storage, "d", lazy(dataset), logger)
    read = xr.open_zarr(local_dataset(storage, "d"), consolidated=False, mask_and_scale=False)
    assert read["t2m"].dtype == read["mask"].dtype == "int16"
    read = xr.open_zarr(local_dataset(storage, "d"), consolidated=False)
    for name in ("t2m", "mask"):
        assert np.allclose(read[name], values, rtol=1e-6, equal_nan=True)
    assert np.array_equal(read["day"], dataset["day"])


def test_times_in_fractions_of_days_are_stored(client, tmp_path) -> None:
    """As a file has them whose days are float64: rounded to microseconds, which is no change."""
    storage = DirectoryStorage(tmp_path)
    times = np.datetime64("2015-01-01T00:20", "ns") + np.arange(960) * np.timedelta64(1, "h")
    field = xr.DataArray(da.zeros(960, chunks=240), {"time": times}, ("time",), name="t2m")
    field.time.encoding = {"units": "days since 1800-01-01", "dtype": "float64"}
    publish_computed(client, storage, "d", lazy(field), logger)
    read = xr.open_zarr(local_dataset(storage, "d"), consolidated=False)
    assert np.abs(read.time.values - times).max() < np.timedelta64(1, "ms")


@pytest.mark.filterwarnings("ignore:saving variable", "ignore:invalid value encountered in cast")
@pytest.mark.parametrize(
    ("values", "encoding"),
    [
        ([1.5, 1e4], PACKED),
        ([1.5, 1.2345], PACKED),
        ([1.5, np.nan], {"dtype": "int16", "scale_factor": 0.1}),
        ([1.5, 2.0], {"dtype": "int8"}),
        ([1.0, -9.0], {"_FillValue": -9.0}),
        (np.array([2**25 + 1, 0]), {"dtype": "float32"}),
    ],
    ids=[
        *("too large", "finer than the scale", "no fill value", "no scale", "the fill value"),
        "a large integer",
    ],
)
@pytest.mark.parametrize("is_dasks", [True, False], ids=["of Dask", "in memory"])
def test_values_that_packing_would_change_are_refused(
    values, encoding, is_dasks, client, tmp_path
) -> None:
    """Computed values often have the packing of the file that they were computed from."""
    storage = DirectoryStorage(tmp_path)
    given = values if isinstance(values, np.ndarray) else np.array(values, "float64")
    dataset = packed(da.from_array(given, chunks=1) if is_dasks else given, encoding).to_dataset()
    dataset["other"] = ("x", da.zeros(2, chunks=1))
    says = r"values of t2m .* stored .* encoding .* drop_encoding\(\)"
    with pytest.raises(InvalidParamsError, match=says):
        publish_computed(client, storage, "d", lazy(dataset), logger)
    assert find_dataset(storage, "d") is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: da.ones(10, chunks=((3, 4, 3),)), "uniform chunk sizes .* chunk()"),
        (lambda: xr.Dataset({"a": ("x", da.ones(9)), "sum": da.ones(3).sum()}), "sum .* single"),
        (lambda: xr.Dataset({"a": ("x", da.ones(9))}, attrs={"by": object()}), "as Zarr"),
        (lambda: xr.Dataset({"a/b": ("x", da.ones(9))}), "a/b .* slash .* rename"),
    ],
)
def test_what_zarr_cant_hold_is_refused(make, says, client, tmp_path) -> None:
    """The error says why, and nothing is left."""
    storage = DirectoryStorage(tmp_path)
    with pytest.raises(InvalidParamsError, match=says):
        publish_computed(client, storage, "d", lazy(make()), logger)
    assert find_dataset(storage, "d") is None
    assert not list(Path(tmp_path).rglob("zarr.json"))


def counting(**meta):
    """Return what makes a Dask array of 0 to 11 in three blocks, of which `meta` says more."""
    return lambda of_block: da.arange(12, chunks=4).map_blocks(of_block, **meta)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize(
    ("made", "says"),
    [
        (counting(dtype="int64")(lambda block: block[block != 5]), r"shape \(3,\), but \(4,\) in"),
        (counting(dtype="int64")(lambda block: block.repeat(2)), r"shape \(8,\), but \(4,\) in"),
        (counting(dtype="int32")(lambda block: block + 0.7), "is float64, but int32 in the Dask"),
        (counting(dtype="int32")(lambda block: np.where(block > 3, block, np.nan)), "but int32"),
        (counting(dtype="int8")(lambda block: block * 100), "is int64, but int8 in the Dask"),
        (counting(dtype="float64")(lambda block: block + 2**53), "is int64, but float64 in"),
        (counting(dtype="float32")(lambda block: block * 1e38), "is float64, but float32 in"),
        (counting(dtype="float64")(lambda block: block * 1j), "is complex128, but float64 in"),
        (counting(dtype="int64")(lambda block: block.astype("M8[s]")), "is datetime64.s., but int"),
    ],
    ids=[
        *("fewer rows", "more rows", "fractions", "nan", "large integers"),
        *("digits", "large floats", "complex", "times"),
    ],
)
def test_a_block_that_isnt_what_dask_says_is_refused(made, says, client, tmp_path) -> None:
    """Zarr would store other values in silence, and its fill value for the rows that lack."""
    storage = DirectoryStorage(tmp_path)
    says = rf"the block of values at \(\d,\) .*{says}"
    with pytest.raises(InvalidParamsError, match=says):
        publish_computed(client, storage, "d", lazy(made), logger)
    assert find_dataset(storage, "d") is None


@pytest.mark.parametrize(
    ("dtype", "of_block", "values"),
    [
        ("int32", lambda block: block * 1.0, list(range(12))),
        ("float32", lambda block: block * 0.1, [np.float32(i * 0.1) for i in range(12)]),
        ("bool", lambda block: block % 2, [bool(i % 2) for i in range(12)]),
    ],
)
def test_a_block_is_cast_if_no_value_changes(dtype, of_block, values, client, tmp_path) -> None:
    """Into the dtype that Dask says, also for the statistics. Floats may be rounded."""
    storage = DirectoryStorage(tmp_path)
    publish_computed(client, storage, "d", lazy(counting(dtype=dtype)(of_block)), logger)
    samples = array(published_dataset(storage, "d"))
    (batch,) = loader_of(samples, 12, shuffle=False)
    assert batch["values"].tolist() == values
    if dtype != "bool":
        found = statistics_in(storage, "d")["values"]
        assert (found["maximum"], found["num_values"]) == (float(max(values)), 12)
