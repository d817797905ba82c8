"""Writes a Zarr group of a dataset: its parts on the Dask workers that computed them; no torch."""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefect_torch_ddp.data.arrays.statistics import measured
from prefect_torch_ddp.data.datasets.dataset_manifest import DatasetFile, Written
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import Storage

HOW: Mapping[str, Any] = {"zarr_format": 3, "consolidated": False, "write_empty_chunks": True}
"""How xarray writes. A chunk that has only the fill value would otherwise be missing."""

_NUMBERS = "biufc"
_CHECKED = f"{_NUMBERS}mM"
"""NumPy's letters of dtypes whose values are checked. Others can't become tensors."""
TIME_TOLERANCE = np.timedelta64(1, "ms")


@dataclass(frozen=True)
class VariableTarget:
    """A variable of a Zarr group whose metadata is known, and whose chunks aren't written yet."""

    storage: Storage
    files_key: str
    """The folder of the dataset's files, which is the group's."""
    name: str
    dims: tuple[str, ...]
    dtype: np.dtype[Any]
    """As the Dask array says."""
    metadata: Mapping[str, bytes]
    """Zarr's objects that describe the group and the variable."""
    is_measured: bool
    """Whether statistics of it are wanted."""
    encoding: Mapping[str, Any]
    """How the values are to be stored, such as packed as integers; empty: as they are."""


def write_block(
    block: Any, target: VariableTarget, start: tuple[int, ...], shape: tuple[int, ...]
) -> Written:
    """Write a block of whole chunks; return the files, and the block's statistics.

    What is written first stays. Two workers may compute the same block if one of them counts as
    lost. Both then report the same files, even if the values aren't the same in each computation.

    Args:
        block: the values.
        target: where they belong.
        start: the block's first position along each dimension.
        shape: the block's shape, as the Dask array says.

    Raises:
        InvalidParamsError: zarr or xarray can't write the values, or not as the encoding says; or
            the block has another shape than the Dask array says, or values that its dtype can't
            hold.
        StorageError: the storage failed.
    """
    import xarray as xr  # noqa: PLC0415 - an extra
    from zarr.core.buffer.cpu import Buffer  # noqa: PLC0415
    from zarr.storage import MemoryStore  # noqa: PLC0415

    what = f"the block of {target.name} at {start}"
    if np.shape(block) != shape:
        msg = (
            f"{what} has the shape {np.shape(block)}, but {shape} in the Dask array: correct the "
            "function that makes it, or pass chunks= to map_blocks"
        )
        raise InvalidParamsError(msg)
    objects = {key: Buffer.from_bytes(content) for key, content in target.metadata.items()}
    region = {
        dim: slice(first, first + size)
        for dim, first, size in zip(target.dims, start, shape, strict=True)
    }
    # A masked array becomes one with NaN.
    block = _in_dtype(xr.Variable(target.dims, block).values, target.dtype, what)
    part = xr.Dataset({target.name: (target.dims, block)})
    try:
        part.to_zarr(MemoryStore(objects), region=region, **HOW)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        msg = f"{what} can't be written as Zarr: {error}"
        raise InvalidParamsError(msg) from error
    refuse_changed(objects, target.name, part.variables[target.name], target.encoding, region)
    new = [key for key in objects if key not in target.metadata]
    files = [
        _write_first(target.storage, target.files_key, key, objects[key].to_bytes()) for key in new
    ]
    return Written(tuple(files), measured(block) if target.is_measured else None)


def _in_dtype(values: Any, dtype: np.dtype[Any], what: str) -> Any:
    """Return a block's values in the dtype that its Dask array says.

    Zarr would cast them in silence. They are cast here, but only if no value is changed. Floats
    may be rounded to narrower ones.

    Raises:
        InvalidParamsError: a value would change.
    """
    given, wanted = values.dtype.kind, dtype.kind
    if values.dtype == dtype or wanted not in _CHECKED or (given == wanted and wanted in "mM"):
        return values
    is_held = given in _NUMBERS and wanted in _NUMBERS
    if is_held:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
            cast = values.astype(dtype)
            if given == wanted and given in "fc":
                is_held = np.array_equal(np.isinf(cast), np.isinf(values))
            else:
                back = cast.astype(values.dtype)
                is_held = np.array_equal(back, values, equal_nan=wanted in "fc")
    if not is_held:
        msg = (
            f"{what} is {values.dtype}, but {dtype} in the Dask array, which can't hold all of its "
            "values: correct the function that makes it, or pass the right dtype= to map_blocks"
        )
        raise InvalidParamsError(msg)
    return cast


def refuse_changed(
    objects: Mapping[str, Any],
    name: str,
    given: Any,
    encoding: Mapping[str, Any],
    region: Mapping[str, slice],
) -> None:
    """Refuse values that are others when they are read again.

    xarray keeps the encoding of a file for what is computed from it, and integers that are too
    small for the new values wrap around in silence.

    Args:
        objects: of a Zarr group in memory.
        name: of the variable.
        given: the xarray variable that was written.
        encoding: how. Without any, values are stored as they are.
        region: where, along each dimension.

    Raises:
        InvalidParamsError: the values are others.
    """
    import xarray as xr  # noqa: PLC0415 - an extra
    from zarr.storage import MemoryStore  # noqa: PLC0415

    if not encoding or given.dtype.kind not in _CHECKED:
        return
    store: Any = MemoryStore(dict(objects))
    found = xr.open_dataset(store, engine="zarr", chunks=None, consolidated=False, decode_cf=False)
    raw, is_time = found.variables[name].isel(region), given.dtype.kind == "m"
    stored = xr.conventions.decode_cf_variable(name, raw, decode_timedelta=is_time)
    if not _are_equal(given.values, stored.values, abs(encoding.get("scale_factor", 0))):
        how = ", ".join(f"{key} {value}" for key, value in encoding.items())
        msg = (
            f"values of {name} would be others if they are stored as its encoding says ({how}): "
            "they may be computed from those of a file with that encoding. Call drop_encoding() on "
            "the Dataset, or round the values yourself"
        )
        raise InvalidParamsError(msg)


def _are_equal(given: Any, stored: Any, scale: float) -> bool:
    if given.dtype.kind in "mM":
        # Days and hours in float64, as files often have them, are exact to about a microsecond.
        is_same = (np.abs(given - stored) < TIME_TOLERANCE) | (np.isnat(given) & np.isnat(stored))
        return bool(is_same.all())
    if given.dtype.kind in "biu" and not scale:
        return np.array_equal(given, stored)
    # Decoding may give float32 for float64, and multiplies by a scale that is no binary fraction.
    return np.allclose(stored, given, rtol=1e-6, atol=1e-4 * scale, equal_nan=True)


def _write_first(storage: Storage, files_key: str, key: str, content: bytes) -> DatasetFile:
    if not storage.write_if_absent(f"{files_key}/{key}", content):
        content = storage.read(f"{files_key}/{key}")
    return file_of(key, content)


def file_of(key: str, content: bytes) -> DatasetFile:
    """Return the entry of a file in a dataset's manifest."""
    digest = hashlib.sha256(content).hexdigest()
    return DatasetFile(key=key, num_bytes=len(content), sha256=digest)
