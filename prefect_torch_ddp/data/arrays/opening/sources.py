"""What `array()` is given: NumPy's arrays and .npy files; Zarr and xarray by `gridded`."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from prefect_torch_ddp.data.arrays.opening.ranges import read_range
from prefect_torch_ddp.data.arrays.variables import Array, Box, Found, Variable, tensor_dtype
from prefect_torch_ddp.data.images.listing import list_dataset
from prefect_torch_ddp.data.images.location import Location, readable_at
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.storage.locate import is_path
from prefect_torch_ddp.storage.protocol import ListedObject, Readable

SUFFIX = ".npy"
HEADER_BYTES = 64 * 2**10
ROOTS = frozenset({"zarr.json", ".zgroup", ".zarray", ".zmetadata"})
"""An object of one of these names is at the root of a Zarr hierarchy."""


def open_arrays(
    where: Any,
    variables: str | Sequence[str] | None,
    storage: Readable | None,
    **ways: Any,
) -> Found:
    """Open what `array()` is given; reads its metadata and coordinates.

    Raises:
        InvalidParamsError: it is nothing that can be read, or isn't there; a library is missing;
            or an argument means nothing for it.
        StorageError: it can't be read.
    """
    is_xarray = type(where).__module__.partition(".")[0] == "xarray"
    if isinstance(where, np.ndarray) or is_xarray:
        _refuse_ways(where, {"storage": storage, **ways})
    found = _opened(where, variables, storage, ways, is_xarray=is_xarray)
    wanted = [variables] if isinstance(variables, str) else variables or ()
    name = found.variables[0].name
    if found.is_single and {*wanted} - {name}:
        msg = (
            f"variables is {variables!r}, but {found.uri} is a single array, {name}: leave "
            "variables out, or give the group that has them"
        )
        raise InvalidParamsError(msg)
    return found


def _refuse_ways(where: Any, ways: Mapping[str, Any]) -> None:
    given = [name for name, value in ways.items() if value is not None and value is not False]
    if given:
        kind = f"{type(where).__module__.partition('.')[0]}.{type(where).__name__}"
        msg = f"a {kind} is in memory, so {', '.join(given)} has no meaning: leave it out"
        raise InvalidParamsError(msg)


def _opened(
    where: Any,
    variables: str | Sequence[str] | None,
    storage: Readable | None,
    ways: Mapping[str, Any],
    *,
    is_xarray: bool,
) -> Found:
    if isinstance(where, np.ndarray):
        return _single("the array", "values", where.shape, where.dtype, _InMemory(where))
    if is_xarray:
        require_libraries()
        from prefect_torch_ddp.data.arrays.opening.gridded import open_xarray  # noqa: PLC0415

        return open_xarray(where, variables)
    source, prefix = _location(where, storage, ways)
    objects = {
        item.key.removeprefix(prefix).lstrip("/"): item for item in list_dataset(source, prefix)
    }
    uri = f"{source.uri.rstrip('/')}/{prefix}".rstrip("/")
    if "" in objects and prefix.lower().endswith(SUFFIX):
        return _open_npy(source, objects[""], uri)
    if not ROOTS & objects.keys():
        files = [key for key in objects if key.lower().endswith(SUFFIX)]
        which = f"; it has {files[0]}: give the file" if files else ""
        msg = f"there is no Zarr array or group and no .npy file at {uri}{which}"
        raise InvalidParamsError(msg)
    require_libraries()
    from prefect_torch_ddp.data.arrays.opening.gridded import open_zarr  # noqa: PLC0415

    return open_zarr(source, objects, uri, variables)


def require_libraries() -> None:
    """Refuse to go on without zarr and xarray.

    Raises:
        InvalidParamsError: one of them is missing.
    """
    try:
        import xarray  # noqa: PLC0415, F401 - an extra
        import zarr  # noqa: PLC0415, F401 - an extra
    except ImportError as error:
        msg = (
            f"array() needs zarr and xarray, and {error.name} can't be loaded: `pip install zarr "
            "xarray`, or install prefect-torch-ddp with its extra `arrays`"
        )
        raise InvalidParamsError(msg) from error


def _location(where: Location, storage: Readable | None, ways: Any) -> tuple[Readable, str]:
    """Return what the arrays are read from, and the prefix of their objects."""
    name = str(where) if isinstance(where, str | Path) else ""
    if storage is None and name.lower().endswith(SUFFIX):
        if is_path(name):
            above, name = str(Path(name).parent), Path(name).name
        else:
            above, _, name = name.rpartition("/")
        return readable_at(above, None, **ways)[0], name
    source, prefix = readable_at(where, storage, **ways)
    return source, prefix.rstrip("/") if prefix.lower().rstrip("/").endswith(SUFFIX) else prefix


def _single(uri: str, name: str, shape: Any, dtype: Any, read: Any) -> Found:
    if not shape:
        msg = f"{uri} is a single number, and has no samples"
        raise InvalidParamsError(msg)
    dims = tuple(f"dim_{i}" for i in range(len(shape)))
    of_tensor = tensor_dtype(uri, dtype)
    only = Variable(name, dims, tuple(shape), of_tensor, None, read)
    return Found(uri, [only], {}, is_single=True)


@dataclass(frozen=True, eq=False)
class _InMemory:
    values: Array

    def __call__(self, box: Box) -> Array:
        return self.values[box]


@dataclass(frozen=True)
class _NpyFile:
    """A file of NumPy's, of which only the rows that are asked for are read."""

    source: Readable
    listed: ListedObject
    offset: int
    """Where its values begin."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __call__(self, box: Box) -> Array:
        start, stop, _ = box[0].indices(self.shape[0])
        row_bytes = self.dtype.itemsize * prod(self.shape[1:])
        first, last = (self.offset + row_bytes * row for row in (start, stop))
        content = read_range(self.source, self.listed, first, last)
        rows = np.frombuffer(content, self.dtype).reshape(stop - start, *self.shape[1:])
        # A part of the rows, if only that is used, without the rest of them.
        return np.ascontiguousarray(rows[(slice(None), *box[1:])])


def _open_npy(source: Readable, listed: ListedObject, uri: str) -> Found:
    head = io.BytesIO(read_range(source, listed, 0, min(HEADER_BYTES, listed.num_bytes)))
    try:
        version = np.lib.format.read_magic(head)
        of_version = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, is_fortran, dtype = of_version[version](head)
    except (ValueError, KeyError) as error:
        msg = f"{uri} ({listed.num_bytes} bytes) can't be read as .npy: {error}; replace it"
        raise StorageError(msg) from error
    if is_fortran:
        msg = f"{uri} lies in Fortran's order: write numpy.ascontiguousarray(values) in prepare"
        raise InvalidParamsError(msg)
    # Objects are a pickle of any length; their dtype is refused later, by its name.
    if not dtype.hasobject and head.tell() + dtype.itemsize * prod(shape) != listed.num_bytes:
        msg = f"{uri} has {listed.num_bytes} bytes, which aren't those of its header: replace it"
        raise StorageError(msg)
    read = _NpyFile(source, listed, head.tell(), shape, dtype)
    return _single(uri, "values", shape, dtype, read)
