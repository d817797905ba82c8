"""Opens what `array()` is given: NumPy arrays; files by `npy`, Zarr and xarray by `gridded`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prefect_torch_ddp.data.arrays.opening.npy import open_npy, open_npy_parts, single
from prefect_torch_ddp.data.arrays.variables import Array, Box, Found
from prefect_torch_ddp.data.images.listing import list_dataset
from prefect_torch_ddp.data.images.location import Location, readable_at
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.locate import is_path
from prefect_torch_ddp.storage.protocol import Readable

SUFFIX = ".npy"
PART = re.compile(r"part-[^/]*\.npy")
"""A file of a Bag's arrays, which are one array together."""
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
    if isinstance(where, np.ma.MaskedArray):
        msg = "array() can't keep the mask of a masked array: fill it, by .filled(number)"
        raise InvalidParamsError(msg)
    if isinstance(where, np.ndarray):
        return single("the array", "values", where.shape, where.dtype, _InMemory(where))
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
        return open_npy(source, objects[""], uri)
    if not ROOTS & objects.keys():
        files = [key for key in objects if key.lower().endswith(SUFFIX)]
        if files and all(map(PART.fullmatch, files)):
            return open_npy_parts(source, objects, sorted(files), uri)
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


@dataclass(frozen=True, eq=False)
class _InMemory:
    values: Array

    def __call__(self, box: Box) -> Array:
        return self.values[box]
