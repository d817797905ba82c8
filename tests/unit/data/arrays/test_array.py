"""Samples of Zarr, .npy and xarray: what they are, their order, their places; what is refused."""

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

from prefect_torch_ddp.data import array
from prefect_torch_ddp.data.arrays import axes as array_axes
from prefect_torch_ddp.data.arrays.pieces import ArrayPieces
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.unit.data.arrays.array_files import samples_of, walk, weather
from tests.unit.data.test_loader import loader_of

zarr = pytest.importorskip("zarr")
xr = pytest.importorskip("xarray")
# Which xarray writes, and whose readers needn't know of it.
pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
CHUNKS = {"t2m": {"chunks": (4, 3, 6)}, "mask": {"chunks": (8, 6)}}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch) -> None:
    """Have a piece for the samples of each chunk."""
    monkeypatch.setattr(array_axes, "PIECE_BYTES", 1)


def by_xarray(folder: Any, zarr_format: int) -> None:
    """Write a group by xarray."""
    weather().to_zarr(folder, zarr_format=zarr_format, encoding=CHUNKS)


def by_dask(folder: Any, zarr_format: int) -> None:
    """Write a group by Dask, through xarray."""
    import dask

    chunked = weather().chunk({"time": 4, "lat": 4, "lon": 6})
    with dask.config.set(scheduler="synchronous"):
        chunked.to_zarr(folder, zarr_format=zarr_format)


def by_zarr(folder: Any, zarr_format: int) -> None:
    """Write a group by zarr, whose arrays have no names of dimensions."""
    group = zarr.open_group(folder, mode="w", zarr_format=zarr_format)
    values = weather()["t2m"].values
    group.create_array("t2m", data=values, chunks=(3, 5, 4), config={"write_empty_chunks": True})


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("written", [by_xarray, by_dask, by_zarr])
def test_a_sample_is_a_place_along_the_first_dimension(written, zarr_format, tmp_path) -> None:
    """Whoever wrote it, in either format, each comes once, in the order of the array."""
    written(tmp_path / "a.zarr", zarr_format)
    found = samples_of(array(tmp_path / "a.zarr", "t2m", numbered=True))
    assert list(found) == list(range(20))
    expected = weather()["t2m"].values
    assert all((each["t2m"] == expected[number]).all() for number, each in found.items())


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_windows_and_patches_are_cut_where_their_coordinates_say(zarr_format, tmp_path) -> None:
    """Of all variables; one without time has its part of each patch in each sample."""
    by_xarray(tmp_path / "a.zarr", zarr_format)
    window, patch = {"time": 3}, {"lat": 4, "lon": 2}
    samples = array(tmp_path / "a.zarr", window=window, patch=patch, numbered=True)
    assert len(samples) == 18 * 2 * 3
    data = weather()
    places = set()
    for number, each in samples_of(samples).items():
        where = samples.where(number)
        assert {name: len(values) for name, values in where.items()} == {**window, **patch}
        expected = data.sel(where)
        assert (each["t2m"] == expected["t2m"].values).all()
        assert (each["mask"] == expected["mask"].values).all()
        places.add(tuple(float(values[0]) for values in where.values()))
    assert len(places) == len(samples)


def test_strides_and_what_is_left_out(tmp_path, caplog) -> None:
    """Samples begin so far from each other, and what fills none at the end is named."""
    caplog.set_level("INFO")
    np.save(tmp_path / "a.npy", np.arange(23 * 5).reshape(23, 5))
    samples = array(
        tmp_path / "a.npy", window={"dim_0": 4}, patch={"dim_1": 2}, stride=3, numbered=True
    )
    assert [samples.where(number)["dim_0"][0] for number in range(0, 14, 2)] == [*range(0, 21, 3)]
    assert samples.left_out == {"dim_0": 1, "dim_1": 1}
    assert "in no sample" in caplog.text
    own = array(tmp_path / "a.npy", patch={"dim_1": 2}, stride={"dim_0": 10, "dim_1": 3})
    assert [batch.tolist() for batch in loader_of(own, 10, shuffle=False)] == [
        [[0, 1], [3, 4], [50, 51], [53, 54], [100, 101], [103, 104]]
    ]


@pytest.mark.parametrize("cut", [{}, {"window": {"time": 3}, "patch": {"lat": 4, "lon": 3}}])
def test_any_number_of_ranks_gives_the_same_global_batches(cut, tmp_path) -> None:
    """Each sample comes once an epoch, shuffled anew in each, and from any batch on."""
    by_xarray(tmp_path / "a.zarr", 3)
    samples = array(tmp_path / "a.zarr", numbered=True, shuffle_buffer=30, **cut)
    batches = walk(samples, 6, 1)
    flat = [number for batch in batches for number in batch]
    assert sorted(flat) == list(range(len(samples)))
    assert flat != sorted(flat)
    assert walk(samples, 6, 2) == walk(samples, 6, 4) == batches
    assert walk(samples, 6, 2, start=2) == batches[2:]
    assert walk(samples, 6, 1, epoch=1) != batches
    assert walk(pickle.loads(pickle.dumps(samples)), 6, 2) == batches


def test_a_resume_on_arrays_reads_only_from_its_window_on(tmp_path, monkeypatch) -> None:
    """And an unshuffled pass reads each piece once."""
    by_xarray(tmp_path / "a.zarr", 2)
    # One for each pass: what the first reads ahead may come when the second has begun.
    resumed, whole = (
        array(tmp_path / "a.zarr", "t2m", numbered=True, shuffle_buffer=4) for _ in range(2)
    )
    read: dict[int, list[int]] = {id(each.samples): [] for each in (resumed, whole)}
    own = ArrayPieces.decode
    monkeypatch.setattr(
        ArrayPieces,
        "decode",
        lambda self, number, *rest: read[id(self)].append(number) or own(self, number, *rest),
    )
    assert len(walk(resumed, 2, 1, start=9)) == 1
    last_of_this_epoch, first_of_the_next = 1, 1
    assert len(read[id(resumed.samples)]) <= last_of_this_epoch + first_of_the_next
    list(loader_of(whole, 2, shuffle=False))
    assert sorted(read[id(whole.samples)]) == [0, 1, 2, 3, 4]


def test_windows_that_overlap_hold_each_value_once(tmp_path) -> None:
    """And samples that lie far apart hold no value between them."""
    by_xarray(tmp_path / "a.zarr", 3)

    def held(**cut: Any) -> tuple[int, int]:
        samples = array(tmp_path / "a.zarr", "t2m", select={"lat": slice(70, 50)}, **cut).samples
        (owner,) = samples.decode(0)
        while owner.base is not None:
            owner = owner.base
        return owner.nbytes, samples.pieces[0].num_rows * samples.form.row_bytes

    a_time = 3 * 6 * 4
    assert held(window={"time": 3}) == ((4 + 2) * a_time, 4 * 3 * a_time)
    assert held(stride=3) == (2 * a_time, 2 * a_time)


def test_numpy_and_xarray_in_memory_are_arrays_too(tmp_path) -> None:
    """A NumPy array, a file, a DataArray and a plain Zarr array give the same tensors."""
    values = weather()["t2m"].values
    np.save(tmp_path / "a.npy", values)
    zarr.save_array(tmp_path / "a.zarr", values)
    for where in (values, tmp_path / "a.npy", weather()["t2m"], str(tmp_path / "a.zarr")):
        batches = list(loader_of(array(where, missing="fill"), 6, shuffle=False))
        assert torch.cat(batches).numpy().tolist() == values.tolist()


def test_select_takes_coordinates_or_positions() -> None:
    """Both ends of coordinates count, and `where` tells the same ones."""
    select = {"time": slice("2020-01-03", "2020-01-05"), "lat": slice(70, 40)}
    samples = array(weather(), "t2m", select=select, numbered=True)
    expected = weather()["t2m"].sel(select).values
    assert expected.shape == (3, 4, 6)
    found = samples_of(samples)
    assert [each["t2m"].tolist() for each in found.values()] == expected.tolist()
    assert str(samples.where(2)["time"]).startswith("2020-01-05")
    rows = array(np.arange(10), select={"dim_0": slice(2, 5)})
    assert [batch.tolist() for batch in loader_of(rows, 9, shuffle=False)] == [[2, 3, 4]]


@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_years_are_selected_in_calendars_without_leap_days(calendar, tmp_path) -> None:
    """As xarray does it, whose dates pandas can't compare with texts; climate models have them."""
    pytest.importorskip("cftime")
    time = xr.date_range("1999-01-01", periods=48, freq="MS", calendar=calendar, use_cftime=True)
    data = xr.Dataset({"t": ("time", np.arange(48.0))}, {"time": time})
    data.to_zarr(tmp_path / "a.zarr", zarr_format=2, consolidated=True)
    select = {"time": slice("2000", "2001-06")}
    found = array(tmp_path / "a.zarr", "t", select=select, missing="fill", numbered=True)
    (batch,) = loader_of(found, 99, shuffle=False)
    assert batch["t"].tolist() == data["t"].sel(select).values.tolist() == [*range(12, 30)]
    assert str(found.where(0)["time"]).startswith("2000-01-01")


def test_dates_that_descend_are_selected_by_dates_only() -> None:
    """Pandas gives positions in place of a slice, if the bounds are texts."""
    days = np.arange("2020-01-09", "2020-01-01", -1, dtype="datetime64[D]").astype("datetime64[ns]")
    data = xr.Dataset({"t": ("time", np.arange(8.0))}, {"time": days})
    with pytest.raises(InvalidParamsError, match="its dates descend: sort it in prepare"):
        array(data, "t", select={"time": slice("2020-01-05", None)})
    (batch,) = loader_of(array(data, "t", select={"time": slice(days[1], days[2])}), 9)
    assert sorted(batch["t"].tolist()) == [1, 2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 6}, "window is 6; give a dict by dimension, such as {'time': 6}"),
        ({"window": {0: 6}}, "window is {0: 6}; .* without names are 'dim_0'"),
        ({"patch": 64}, "patch is 64; give a dict by dimension"),
        ({"patch": ["lat", "lon"]}, r"patch is \['lat', 'lon'\]; give a dict"),
        ({"select": slice(0, 3)}, r"select is slice\(0, 3, None\); give a dict .*'2000'"),
        ({"normalize": 280.0}, "normalize is 280.0; choose True, False, or"),
        ({"normalize": {"t2m": 280.0}}, r"normalize has 280.0 for t2m; give \(mean, std\)"),
        ({"normalize": {"t2m": (1, 2, 3)}}, r"normalize has \(1, 2, 3\) for t2m"),
        ({"normalize": {"t2m": ("1", "2")}}, "normalize has .* for t2m"),
        ({"normalize": {"t2m": np.ones((2, 3))}}, r"normalize has array\(.*\n.* for t2m"),
    ],
)
def test_arguments_of_another_kind_are_refused(options, says, tmp_path) -> None:
    """Before anything is opened: nothing is there."""
    with pytest.raises(InvalidParamsError, match=says):
        array(tmp_path / "nothing.zarr", **options)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_missing_chunk_is_refused_or_filled(zarr_format, tmp_path) -> None:
    """Before work starts, by its name; unless it is in a part that isn't used."""
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=zarr_format)
    made = group.create_array("x", shape=(8, 2), chunks=(4, 2), dtype="int16", fill_value=7)
    made[4:] = 1
    name = "x/0.0" if zarr_format == 2 else "x/c/0/0"
    with pytest.raises(InvalidParamsError, match=rf"x lacks 1 of its chunks: {name}\..*fill"):
        array(tmp_path / "a.zarr")
    with pytest.raises(InvalidParamsError, match="lacks 1 of its chunks"):
        array(tmp_path / "a.zarr", "x", select={"dim_0": slice(3, 8)})
    array(tmp_path / "a.zarr", "x", select={"dim_0": slice(4, 8)})
    (batch,) = loader_of(array(tmp_path / "a.zarr", missing="fill"), 8, shuffle=False)
    assert batch["x"].tolist() == [[7, 7]] * 4 + [[1, 1]] * 4


def test_an_array_in_shards_needs_a_choice(tmp_path) -> None:
    """Which of its chunks are missing isn't seen from outside."""
    values = np.arange(64, dtype="float32").reshape(16, 4)
    zarr.create_array(tmp_path / "a.zarr", data=values, chunks=(2, 4), shards=(8, 4))
    with pytest.raises(InvalidParamsError, match=r"a\.zarr is written in shards.*missing='fill'"):
        array(tmp_path / "a.zarr")
    samples = array(tmp_path / "a.zarr", missing="fill")
    assert len(samples.samples.pieces) == 2
    assert torch.cat(list(loader_of(samples, 5, shuffle=False))).tolist() == values.tolist()


def test_nan_is_refused_kept_or_replaced() -> None:
    """The error names the variable and the place of the sample."""
    values = np.ones((6, 4), "float32")
    values[5, 1] = np.nan
    data = xr.Dataset({"a": (("time", "x"), values)}, {"time": np.arange(6) * 10})
    refused = array(data)
    with pytest.raises(InvalidParamsError, match=r"a has NaN in the sample at time from 5 on"):
        list(loader_of(refused, 2))
    for nan, there in (("keep", np.nan), (-1, -1.0), (0.5, 0.5)):
        (batch,) = loader_of(array(data, nan=nan), 6, shuffle=False)
        expected = np.where(np.isnan(values), there, values)
        assert np.array_equal(batch["a"].numpy(), expected, equal_nan=True)
    outside = array(data, window={"time": 2}, stride=4, select={"time": slice(0, 50)})
    assert len(outside) == 2
    with pytest.raises(InvalidParamsError, match="time from 4 on"):
        list(loader_of(outside, 2))
    assert len(list(loader_of(array(data, select={"time": slice(0, 40)}), 5))) == 1


def test_values_are_decoded_as_their_attributes_say(tmp_path) -> None:
    """Packed values become real ones, and a fill value NaN; their array by itself is refused."""
    values = np.array([[1.5, np.nan], [2.5, 3.0]], "float32")
    encoding = {"a": {"dtype": "int16", "scale_factor": 0.5, "_FillValue": -1}}
    xr.Dataset({"a": (("time", "x"), values)}).to_zarr(tmp_path / "a.zarr", encoding=encoding)
    (batch,) = loader_of(array(tmp_path / "a.zarr", nan=np.float32(-9)), 2, shuffle=False)
    assert batch["a"].tolist() == [[1.5, -9.0], [2.5, 3.0]]
    with pytest.raises(InvalidParamsError, match=r"_FillValue, scale_factor.*group"):
        array(tmp_path / "a.zarr" / "a")


def test_unsigned_and_big_endian_numbers_become_tensors() -> None:
    """In the next larger dtype that torch computes with."""
    for given, expected in (("uint16", torch.int32), (">f8", torch.float64), ("bool", torch.bool)):
        (batch,) = loader_of(array(np.ones((2, 3), given)), 2)
        assert batch.dtype == expected
        assert batch.shape == (2, 3)


@pytest.mark.parametrize("dtype", ["uint64", ">u8"])
def test_a_number_too_large_for_int64_is_refused(dtype) -> None:
    """By its variable and value, when a sample has it; not if it becomes a float."""
    values = np.array([0, 2**63 - 1, 2**63 + 5, 3], dtype)
    data = xr.Dataset({"a": ("time", values)})
    with pytest.raises(InvalidParamsError, match=rf"a has {2**63 + 5}, .* too large for int64"):
        list(loader_of(array(data), 4))
    (batch,) = loader_of(array(data, select={"time": slice(0, 2)}), 4, shuffle=False)
    assert batch["a"].tolist() == [0, 2**63 - 1]
    (batch,) = loader_of(array(data, stride=3), 4, shuffle=False)
    assert batch["a"].tolist() == [0, 3]
    (batch,) = loader_of(array(data, normalize={"a": (0, 2**63)}), 4, shuffle=False)
    assert batch["a"].tolist() == pytest.approx([0, 1, 1, 0])


def test_a_number_for_nan_has_to_fit() -> None:
    """It isn't made infinite: also not in float16 that is normalised afterwards."""
    for dtype, nan in (
        *(("float16", 1e5), ("float32", -1e300), ("complex64", 1e39)),
        *(("float64", 10**400), ("float32", -(10**400))),
    ):
        data = xr.Dataset({"a": ("time", np.ones(4, dtype)), "n": ("time", np.ones(4, "int8"))})
        scale = {} if dtype == "complex64" else {"a": (0, 1)}
        says = rf"{re.escape(str(nan))}, which a of .*{dtype}.* can't hold"
        with pytest.raises(InvalidParamsError, match=says):
            array(data, nan=nan, normalize=scale)
        array(data, "n", nan=nan)
    array(np.ones(4), nan=1e300)


def test_select_refuses_coordinates_that_are_not_sorted(tmp_path) -> None:
    """What lies between two of them may be anything: a year of the test, say."""
    years = [2000, 2017, 2001, 2002]
    data = xr.Dataset({"a": ("time", np.arange(4.0))}, {"time": years})
    data.to_zarr(tmp_path / "a.zarr")
    for where in (data, tmp_path / "a.zarr"):
        with pytest.raises(InvalidParamsError, match=r"coordinates aren't sorted: .*sortby"):
            array(where, select={"time": slice(2000, 2002)}, missing="fill")
    later = array(data.sortby("time"), select={"time": slice(2000, 2002)})
    assert len(later) == 3


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"variables": "t3m"}, r"no variable 't3m'; it has mask, t2m"),
    ({"window": {"tim": 3}}, "tim is none of them"),
    ({"window": {"lat": 3}, "patch": {"lat": 3}}, "lat is in window and in patch"),
    ({"window": {"time": 3}, "stride": {"lat": 2}}, "lat is none of them"),
    ({"window": {"time": 21}}, "time has 20 positions, and a sample takes 21"),
    ({"window": {"time": 0}}, "the extent of time is 0"),
    ({"select": {"time": 3}}, r"select\['time'\] is 3: give a slice"),
    ({"select": {"time": slice("1999", "2000")}}, "no position"),
    ({"select": {"lat": slice(40, 70)}}, "its lat descends, so the larger end comes first"),
    ({"nan": "drop"}, "nan is 'drop'"),
    ({"missing": None}, "missing is None"),
    ({"shuffle_buffer": 0}, "shuffle_buffer is 0"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED)
def test_arguments_of_arrays_that_cannot_be_are_refused(options, says) -> None:
    """By name, before anything is read."""
    with pytest.raises(InvalidParamsError, match=says):
        array(weather(), **options)


def test_a_set_of_variables_is_read_in_one_order(tmp_path) -> None:
    """The same in each process; a batch is a dict, where it doesn't count."""
    by_xarray(tmp_path / "a.zarr", 2)
    for where in (weather(), tmp_path / "a.zarr"):
        found, listed = (
            loader_of(array(where, names, missing="fill"), 4)
            for names in ({"t2m", "mask"}, ["mask", "t2m"])
        )
        assert found.traits == listed.traits
    assert len(array(weather()["t2m"], frozenset({"t2m"}))) == 20


def test_a_single_array_takes_no_other_name(tmp_path) -> None:
    """So nobody trains on a variable that isn't the one they named."""
    values = weather()["t2m"].values
    np.save(tmp_path / "a.npy", values)
    zarr.save_array(tmp_path / "a.zarr", values)
    for where in (values, tmp_path / "a.npy", tmp_path / "a.zarr"):
        for other in ("t2m", ["values", "t2m"]):
            with pytest.raises(InvalidParamsError, match="single array, values: leave variables"):
                array(where, other, missing="fill")
        for own in (None, "values", ["values"]):
            assert len(array(where, own, missing="fill")) == 20
    with pytest.raises(InvalidParamsError, match=r"\['z500'\], but .* is a single array, t2m"):
        array(weather()["t2m"], ["z500"])
    assert len(array(weather()["t2m"], "t2m")) == 20


@pytest.mark.parametrize(
    ("option", "value"), [("storage", DirectoryStorage("/data")), ("anonymous", True)]
)
def test_what_is_in_memory_is_read_from_no_storage(option, value) -> None:
    """The argument would have no effect."""
    for where, kind in ((np.ones(4), "numpy.ndarray"), (weather(), "xarray.Dataset")):
        with pytest.raises(InvalidParamsError, match=f"a {kind} is in memory, so {option} has no"):
            array(where, **{option: value})


def test_the_mask_of_an_array_in_memory_isnt_ignored() -> None:
    """Below a mask lies anything, such as what marks a missing value in a file."""
    with pytest.raises(InvalidParamsError, match=r"mask of a masked array: fill it, by \.filled"):
        array(np.ma.masked_equal([1.0, -999.0], -999.0))


def test_what_is_no_array_is_refused(tmp_path) -> None:
    """Folders without one, Dask's arrays, texts, and damaged files."""
    with pytest.raises(InvalidParamsError, match=r"no Zarr array or group and no \.npy file at"):
        array(tmp_path)
    with pytest.raises(InvalidParamsError, match=r"mask of .* is an array of Dask's.*chunks=None"):
        array(weather().chunk({"time": 4}))
    with pytest.raises(InvalidParamsError, match=r"values of <U1.*leave it out of variables"):
        array(xr.Dataset({"a": ("x", np.array(["a", "b"]))}))
    with pytest.raises(InvalidParamsError, match=r"single samples of arrays.*select="):
        array(np.ones(3))[0]
    (tmp_path / "a.npy").write_bytes(b"not it")
    with pytest.raises(StorageError, match=r"a\.npy \(6 bytes\) can't be read as \.npy"):
        array(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.ones((4, 4)))
    whole = (tmp_path / "b.npy").read_bytes()
    (tmp_path / "b.npy").write_bytes(whole[:-1])
    with pytest.raises(StorageError, match="aren't those of its header"):
        array(tmp_path / "b.npy")
    np.save(tmp_path / "c.npy", np.array([1, None]))
    with pytest.raises(InvalidParamsError, match=r"c\.npy has values of object, of which no"):
        array(tmp_path / "c.npy")


def test_a_chunk_that_was_replaced_deleted_or_damaged_is_an_error(tmp_path) -> None:
    """No such chunk is taken for a missing one, which has the fill value."""
    store = DirectoryStorage(tmp_path)

    def samples() -> Any:
        values = np.arange(32, dtype="int32").reshape(8, 4)
        zarr.create_array(
            tmp_path / "a.zarr", data=values, chunks=(4, 4), fill_value=-1, overwrite=True
        )
        return array("a.zarr", storage=store)

    for strike in ("replaced", "deleted", "damaged"):
        opened = samples()
        chunk = tmp_path / "a.zarr" / "c" / "1" / "0"
        if strike == "damaged":
            chunk.write_bytes(b"x" * 40)
            opened = array("a.zarr", storage=store)
        elif strike == "deleted":
            chunk.unlink()
        else:
            chunk.write_bytes(chunk.read_bytes() + b"x")
        with pytest.raises(StorageError, match=r"c/1/0|can't be decoded"):
            list(loader_of(opened, 8))


def test_without_the_libraries_the_extra_is_named(tmp_path, monkeypatch) -> None:
    """A .npy file needs none."""
    by_xarray(tmp_path / "a.zarr", 3)
    np.save(tmp_path / "a.npy", np.ones((4, 2)))
    monkeypatch.setitem(__import__("sys").modules, "xarray", None)
    with pytest.raises(InvalidParamsError, match=r"zarr and xarray.*extra `arrays`"):
        array(tmp_path / "a.zarr")
    assert len(array(tmp_path / "a.npy")) == 4


def test_small_chunks_are_read_together_and_large_ones_in_parts(monkeypatch) -> None:
    """So that a piece is worth its read, and a window fits the memory."""
    monkeypatch.setattr(array_axes, "PIECE_BYTES", 400)
    monkeypatch.setattr(array_axes, "MAX_PIECE_BYTES", 1000)

    def sizes(**chunks: int) -> list[int]:
        data = weather()
        data["t2m"].encoding["chunks"] = tuple(chunks.get(dim, 1) for dim in data["t2m"].dims)
        samples = array(data, "t2m", window={"time": 2}, patch={"lat": 2, "lon": 3})
        assert samples.samples.form.row_bytes == 48
        assert sum(piece.num_rows for piece in samples.samples.pieces) == len(samples)
        return [piece.num_rows for piece in samples.samples.pieces]

    assert sizes(time=1, lat=2, lon=3) == [9] * 16 + [1] * 8
    assert max(sizes(time=20, lat=8, lon=6)) <= 20
