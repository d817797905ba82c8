"""Zarr by zarr and xarray, in place: groups with named dimensions, and plain arrays; loads both."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import xarray as xr
import zarr

from prefect_torch_ddp.data.arrays.opening.store import ListedStore
from prefect_torch_ddp.data.arrays.variables import (
    Array,
    Box,
    Found,
    Variable,
    chosen,
    tensor_dtype,
)
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.storage.protocol import ListedObject, Readable

ENCODED = frozenset({"scale_factor", "add_offset", "_FillValue", "missing_value"})
"""Attributes by which stored values aren't the real ones, as xarray knows and zarr doesn't."""

NUM_NAMED = 3
"""Chunks in an error."""


@dataclass(frozen=True, eq=False)
class _OfXarray:
    """Reads a variable of xarray, decoded as its attributes say."""

    uri: str
    variable: Any

    def __call__(self, box: Box) -> Array:
        return _explained(self.uri, lambda: self.variable[box].values)


@dataclass(frozen=True, eq=False)
class _OfZarr:
    """Reads a plain array of zarr."""

    uri: str
    array: Any

    def __call__(self, box: Box) -> Array:
        return _explained(self.uri, lambda: self.array[box])


@dataclass(frozen=True, eq=False)
class _Chunks:
    """Tells which chunks of an array of zarr were listed."""

    uri: str
    array: Any
    store: ListedStore

    def refuse_missing(self, used: Sequence[range]) -> None:
        """Refuse an array that lacks a chunk of these positions."""
        if self.array.shards is not None:
            msg = (
                f"{self.uri} is written in shards, within which nobody sees which chunks are "
                "missing without reading them: pass missing='fill' to array(), after which a chunk "
                "that isn't there has the array's fill value"
            )
            raise InvalidParamsError(msg)
        missing = [key for key in self._keys(used) if key not in self.store.objects]
        if missing:
            some = ", ".join(missing[:NUM_NAMED])
            some += ", ..." if len(missing) > NUM_NAMED else ""
            msg = (
                f"{self.uri} lacks {len(missing)} of its chunks: {some}. Write them, or pass "
                "missing='fill' to array(): then they have the array's fill value, "
                f"{self.array.fill_value}. Zarr leaves out chunks that have only that value, "
                "unless it is told write_empty_chunks=True"
            )
            raise InvalidParamsError(msg)

    def content(self, used: Sequence[range]) -> str:
        """Tell other chunks by their sizes, and what makes other values of them."""
        array, objects, digest = self.array, self.store.objects, hashlib.sha256()
        decoding = {name: array.attrs[name] for name in sorted(ENCODED & {*array.attrs})}
        digest.update(repr((str(array.dtype), str(array.fill_value), decoding)).encode())
        for key in self._keys(used):
            listed = objects.get(key)
            digest.update(f"{key} {None if listed is None else listed.num_bytes}\n".encode())
        return digest.hexdigest()

    def _keys(self, used: Sequence[range]) -> Iterator[str]:
        """Yield the keys of the objects that have these positions: chunks, or shards of them."""
        above = f"{self.array.path}/" if self.array.path else ""
        key_of = self.array.metadata.encode_chunk_key
        grid = [
            range(each.start // size, -(-each.stop // size))
            for each, size in zip(used, self.array.shards or self.array.chunks, strict=True)
        ]
        return (above + key_of(place) for place in product(*grid))


def _explained(uri: str, read: Callable[[], Any]) -> Array:
    try:
        return np.asarray(read())
    except (StorageError, MemoryError):
        raise
    except Exception as error:
        # Codecs raise what they like: Blosc a RuntimeError, zlib its own, of a size a ValueError.
        msg = f"{uri} can't be decoded: {error}; replace it"
        raise StorageError(msg) from error


def open_zarr(
    source: Readable,
    objects: Mapping[str, ListedObject],
    uri: str,
    variables: str | Sequence[str] | None,
) -> Found:
    """Open an array or a group of Zarr, of either format.

    Raises:
        InvalidParamsError: it has no such variable, or one that can't be tensors.
        StorageError: it can't be read.
    """
    store = ListedStore(source, objects)
    try:
        opened: Any = zarr.open(store, mode="r")
        arrays = {} if isinstance(opened, zarr.Array) else dict(opened.arrays())
        is_named = arrays and all(_names(array) for array in arrays.values() if array.ndim)
        dataset = xr.open_zarr(store, consolidated=False, chunks=None) if is_named else None
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        msg = f"{uri} can't be read as Zarr: {error}; replace it"
        raise StorageError(msg) from error
    if not arrays:
        if not isinstance(opened, zarr.Array):
            msg = f"{uri} is a Zarr group without arrays: give one of its groups"
            raise InvalidParamsError(msg)
        return Found(uri, [_variable_of(uri, "values", opened, store)], {}, is_single=True)
    if dataset is None:
        names = chosen(uri, [*arrays], variables, "array")
        opened_arrays = [_variable_of(f"{uri}/{name}", name, arrays[name], store) for name in names]
        return Found(uri, opened_arrays, {}, is_single=False, read_object=store.read_object)
    found = open_xarray(dataset, variables, uri)
    with_chunks = []
    for each in found.variables:
        array = arrays[each.name]
        stored, chunks = _Chunks(f"{uri}/{each.name}", array, store), array.shards or array.chunks
        with_chunks.append(replace(each, chunks=chunks, stored=stored, content=stored.content))
    return replace(found, variables=with_chunks, read_object=store.read_object)


def open_xarray(
    given: Any, variables: str | Sequence[str] | None, uri: str = "the xarray object"
) -> Found:
    """Open a Dataset or a DataArray of xarray.

    Raises:
        InvalidParamsError: it has no such variable, one that can't be tensors, or Dask's.
    """
    is_single = isinstance(given, xr.DataArray)
    if is_single:
        name = str(given.name or "values")
        dataset, variables = given.to_dataset(name=name), [name]
    elif isinstance(given, xr.Dataset):
        dataset = given
    else:
        msg = f"array() takes a Dataset or a DataArray of xarray, not a {type(given).__name__}"
        raise InvalidParamsError(msg)
    names = chosen(uri, [str(name) for name in dataset.data_vars], variables, "variable")
    coordinates = {
        str(dim): dataset.coords[dim].values for dim in dataset.dims if dim in dataset.coords
    }
    found = [_variable(uri, name, dataset[name].variable) for name in names]
    return Found(uri, found, coordinates, is_single)


def _variable(uri: str, name: str, variable: Any) -> Variable:
    if variable.chunks is not None:
        msg = (
            f"{name} of {uri} is an array of Dask's, which each rank would compute for itself: "
            "open it with chunks=None, or write it by to_zarr in prepare"
        )
        raise InvalidParamsError(msg)
    chunks = variable.encoding.get("shards") or variable.encoding.get("chunks")
    if chunks is not None and len(chunks) != variable.ndim:
        chunks = None  # of the file that a part of which was chosen
    return Variable(
        name,
        tuple(map(str, variable.dims)),
        tuple(variable.shape),
        tensor_dtype(name, variable.dtype),
        chunks and tuple(chunks),
        _OfXarray(f"{uri}/{name}", variable),
    )


def _variable_of(uri: str, name: str, array: Any, store: ListedStore) -> Variable:
    encoded = sorted(ENCODED & dict(array.attrs).keys())
    if encoded:
        msg = (
            f"{uri} has the attribute {', '.join(encoded)}, so its values have to be decoded by "
            "xarray: give the group that it is in, and its name as variables="
        )
        raise InvalidParamsError(msg)
    if not array.ndim:
        msg = f"{uri} is a single number, and has no samples"
        raise InvalidParamsError(msg)
    dims = _names(array) or tuple(f"dim_{i}" for i in range(array.ndim))
    stored = _Chunks(uri, array, store)
    return Variable(
        name,
        dims,
        array.shape,
        tensor_dtype(name, array.dtype),
        array.shards or array.chunks,
        _OfZarr(uri, array),
        stored,
        content=stored.content,
    )


def _names(array: Any) -> tuple[str, ...]:
    """Return the names of an array's dimensions, if it has any; xarray writes them in both ways."""
    of_format_3 = getattr(array.metadata, "dimension_names", None) or ()
    names = tuple(of_format_3) or tuple(array.attrs.get("_ARRAY_DIMENSIONS", ()))
    return tuple(map(str, names)) if len(names) == array.ndim and all(names) else ()
