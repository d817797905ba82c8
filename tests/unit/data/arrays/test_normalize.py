"""Statistics of variables, and samples that are normalised by them."""

import json

import numpy as np
import pytest

from prefect_torch_ddp.data import array
from prefect_torch_ddp.data.arrays.statistics import (
    Statistics,
    measured,
    merged,
    statistics_in,
    statistics_key,
)
from prefect_torch_ddp.data.datasets.dataset_store import publish_dataset
from prefect_torch_ddp.errors import InvalidParamsError, NewerFormatError, StorageError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.unit.data.arrays.array_files import weather
from tests.unit.data.test_loader import loader_of

pytest.importorskip("zarr")
pytest.importorskip("xarray")
pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


def write(folder, **statistics: Statistics) -> None:
    """Write a Zarr group, and statistics of some variables."""
    weather().to_zarr(folder, zarr_format=3)
    for name, each in statistics.items():
        (folder / statistics_key(name)).write_bytes(each.to_bytes())


def batch_of(where, **options) -> dict:
    """Return all samples."""
    samples = array(where, **options)
    (batch,) = loader_of(samples, len(samples), shuffle=False)
    return batch


def test_parts_merge_to_the_statistics_of_the_whole() -> None:
    """Far from zero too; what isn't finite is only counted."""
    values = np.random.default_rng(0).normal(1e6, 0.5, (300, 70))
    values[3, 4], values[5, 6] = np.nan, np.inf
    whole, finite = measured(values), values[np.isfinite(values)]
    parts = merged(measured(part) for part in np.array_split(values, 7))
    for found in (whole, parts):
        assert (found.num_values, found.num_not_finite) == (finite.size, 2)
        assert [found.mean, found.std] == pytest.approx([finite.mean(), finite.std()], rel=1e-9)
        assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    assert measured(np.array([True])) is None
    assert measured(np.array([np.nan])) == Statistics(0, 1, 0.0, 0.0, 0.0, 0.0)


def test_samples_are_normalised_by_the_datasets_statistics(tmp_path) -> None:
    """NaN is replaced before; variables of booleans stay."""
    values = weather()["t2m"].values
    write(tmp_path / "a", t2m=measured(values))
    batch = batch_of(tmp_path / "a", normalize=True, window={"time": 2}, patch={"lat": 4})
    assert batch["t2m"].dtype == __import__("torch").float32
    assert batch["mask"].dtype == __import__("torch").bool
    plain = batch_of(tmp_path / "a", window={"time": 2}, patch={"lat": 4})["t2m"].numpy()
    expected = (plain - values.mean()) / values.std()
    assert np.allclose(batch["t2m"].numpy(), expected, atol=1e-5)


def test_given_numbers_normalise_only_their_variable() -> None:
    """Also one of integers, or in memory."""
    batch = batch_of(np.arange(12).reshape(6, 2), normalize={"values": (2, 4)})
    assert batch.tolist() == ((np.arange(12).reshape(6, 2) - 2) / 4).tolist()
    constant = batch_of(np.full((4, 2), 7), normalize={"values": (7, 0)})
    assert constant.tolist() == [[0, 0]] * 4


@pytest.mark.parametrize("dtype", ["float16", ">f2"])
def test_float16_is_normalised_in_float32(dtype) -> None:
    """A mean that float16 doesn't have is subtracted as it is."""
    values = (2000 + np.arange(64).reshape(16, 4) % 5).astype(dtype)
    mean, std = values.astype("float64").mean(), values.astype("float64").std()
    batch = batch_of(values, normalize={"values": (mean, std)})
    expected = (values.astype("float64") - mean) / std
    assert np.allclose(batch.numpy(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("normalize", "says"),
    [
        (True, r"has no t2m/statistics.json.*normalize={'t2m': \(mean, std\)}"),
        ({"t3m": (0, 1)}, "names t3m; what is read is mask, t2m"),
        ({"mask": (0, 1)}, "mask .bool. can't be normalised"),
        ({"t2m": (0, -1)}, "std -1"),
        ("yes", "normalize is 'yes'"),
    ],
)
def test_what_cant_normalise_is_refused(normalize, says, tmp_path) -> None:
    """Before work starts."""
    write(tmp_path / "a")
    with pytest.raises(InvalidParamsError, match=says):
        array(tmp_path / "a", normalize=normalize)


def test_statistics_of_a_newer_format_or_damaged_are_an_error(tmp_path) -> None:
    """They name the file; a field more changes nothing."""
    write(tmp_path / "a", t2m=measured(np.ones(3)))
    file = tmp_path / "a" / "t2m" / "statistics.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"median": 1.0}))
    array(tmp_path / "a", normalize=True)
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"format": 99}))
    with pytest.raises(NewerFormatError, match=r"t2m/statistics.json .* format 99"):
        array(tmp_path / "a", normalize=True)
    file.write_text("{}")
    with pytest.raises(StorageError, match=r"t2m/statistics.json can't be read"):
        array(tmp_path / "a", normalize=True)


def test_a_card_gets_the_statistics_of_a_dataset(tmp_path, caplog) -> None:
    """A file of the same name that prepare wrote itself is left out."""
    storage = DirectoryStorage(tmp_path)
    known = measured(np.arange(5))

    def prepare(folder) -> None:
        write(folder, t2m=known)
        (folder / "mask" / "statistics.json").write_text("[]")

    publish_dataset(storage, "d", prepare)
    found = statistics_in(storage, "d")
    assert {name: each["mean"] for name, each in found.items()} == {"t2m": 2.0}
    assert "mask/statistics.json" in caplog.text
