"""Writes a Zarr group of a dataset: its parts on the Dask workers that computed them; no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prefect_torch_ddp.data.arrays.statistics import measured
from prefect_torch_ddp.data.dataset_manifest import DatasetFile, Written
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import Storage

HOW: Mapping[str, Any] = {"zarr_format": 3, "consolidated": False, "write_empty_chunks": True}
"""How xarray writes. A chunk that has only the fill value would otherwise be missing."""


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


def write_block(block: Any, target: VariableTarget, start: tuple[int, ...]) -> Written:
    """Write a block of whole chunks; return the files, and the block's statistics.

    What is written first stays. Two workers may compute the same block if one of them counts as
    lost. Both then report the same files, even if the values aren't the same in each computation.

    Args:
        block: the values.
        target: where they belong.
        start: the block's first position along each dimension.

    Raises:
        InvalidParamsError: zarr or xarray can't write the values.
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
    new = [key for key in objects if key not in target.metadata]
    files = [
        _write_first(target.storage, target.files_key, key, objects[key].to_bytes()) for key in new
    ]
    return Written(tuple(files), measured(block) if target.is_measured else None)


def _write_first(storage: Storage, files_key: str, key: str, content: bytes) -> DatasetFile:
    if not storage.write_if_absent(f"{files_key}/{key}", content):
        content = storage.read(f"{files_key}/{key}")
    return file_of(key, content)


def file_of(key: str, content: bytes) -> DatasetFile:
    """Return the entry of a file in a dataset's manifest."""
    digest = hashlib.sha256(content).hexdigest()
    return DatasetFile(key=key, num_bytes=len(content), sha256=digest)
