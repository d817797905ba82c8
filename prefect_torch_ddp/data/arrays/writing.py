"""Writes a Zarr group of a dataset: its parts on the Dask workers that computed them; no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prefect_torch_ddp.data.arrays.statistics import measured
from prefect_torch_ddp.data.dataset_manifest import DatasetFile, Written
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import Storage

HOW: Mapping[str, Any] = {"zarr_format": 3, "consolidated": False, "write_empty_chunks": True}
"""How xarray writes. A chunk that has only the fill value would otherwise be missing."""

TIME_TOLERANCE = np.timedelta64(1, "ms")


@dataclass(frozen=True)
class VariableTarget:
    """A variable of a Zarr group whose metadata is known, and whose chunks aren't written yet."""

    storage: Storage
    files_key: str
    """The folder of the dataset's files, which is the group's."""
    name: str
    dims: tuple[str, ...]
    metadata: Mapping[str, bytes]
    """Zarr's objects that describe the group and the variable."""
    is_measured: bool
    """Whether statistics of it are wanted."""
    encoding: Mapping[str, Any]
    """How the values are to be stored, such as packed as integers; empty: as they are."""


def write_block(block: Any, target: VariableTarget, start: tuple[int, ...]) -> Written:
    """Write a block of whole chunks; return the files, and the block's statistics.

    What is written first stays. Two workers may compute the same block if one of them counts as
    lost. Both then report the same files, even if the values aren't the same in each computation.

    Args:
        block: the values.
        target: where they belong.
        start: the block's first position along each dimension.

    Raises:
        InvalidParamsError: zarr or xarray can't write the values, or not as the encoding says.
        StorageError: the storage failed.
    """
    import xarray as xr  # noqa: PLC0415 - an extra
    from zarr.core.buffer.cpu import Buffer  # noqa: PLC0415
    from zarr.storage import MemoryStore  # noqa: PLC0415

    objects = {key: Buffer.from_bytes(content) for key, content in target.metadata.items()}
    region = {
        dim: slice(first, first + size)
        for dim, first, size in zip(target.dims, start, block.shape, strict=True)
    }
    part = xr.Dataset({target.name: (target.dims, block)})
    try:
        part.to_zarr(MemoryStore(objects), region=region, **HOW)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        msg = f"the block of {target.name} at {start} can't be written as Zarr: {error}"
        raise InvalidParamsError(msg) from error
    refuse_changed(objects, target.name, part.variables[target.name], target.encoding, region)
    new = [key for key in objects if key not in target.metadata]
    files = [
        _write_first(target.storage, target.files_key, key, objects[key].to_bytes()) for key in new
    ]
    return Written(tuple(files), measured(block) if target.is_measured else None)


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

    if not encoding or given.dtype.kind not in "biufcmM":
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
