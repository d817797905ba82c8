"""Files of NumPy's, read in place: one, or the parts of an array that Dask workers wrote."""

import io
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from prefect_torch_ddp.data.arrays.opening.ranges import read_range
from prefect_torch_ddp.data.arrays.variables import (
    Array,
    Box,
    Content,
    Found,
    Variable,
    tensor_dtype,
)
from prefect_torch_ddp.data.datasets.dataset_manifest import in_parallel
from prefect_torch_ddp.data.sampler import short_digest
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.storage.protocol import ListedObject, Readable

HEADER_BYTES = 64 * 2**10


def open_npy(source: Readable, listed: ListedObject, uri: str) -> Found:
    """Open a file.

    Raises:
        InvalidParamsError: no tensor can be made of its values.
        StorageError: it can't be read.
    """
    file = _opened(source, listed, uri)
    return single(uri, "values", file.shape, file.dtype, file, content=file.content)


def open_npy_parts(
    source: Readable, objects: Mapping[str, ListedObject], keys: Sequence[str], uri: str
) -> Found:
    """Open files that are one array together, along its first dimension.

    Args:
        source: reads them.
        objects: the files and others, such as statistics, by key.
        keys: of the files, in their order.
        uri: of their folder.

    Raises:
        InvalidParamsError: a file has another shape or dtype; or as `open_npy`.
        StorageError: one can't be read.
    """
    files = in_parallel(lambda key: _opened(source, objects[key], f"{uri}/{key}"), keys)
    first = files[0]
    for key, file in zip(keys, files, strict=True):
        if not file.shape or (file.dtype, file.shape[1:]) != (first.dtype, first.shape[1:]):
            msg = (
                f"{uri}/{key} has {file.dtype} {file.shape[1:]} in each row, and {keys[0]} "
                f"{first.dtype} {first.shape[1:]}: they are no parts of one array"
            )
            raise InvalidParamsError(msg)
    read = _NpyParts(tuple(files), tuple(accumulate(file.shape[0] for file in files)))
    shape = read.ends[-1], *first.shape[1:]
    found = single(uri, "values", shape, first.dtype, read, content=read.content)
    return replace(found, read_object=partial(_read_object, source, objects))


def _read_object(source: Readable, objects: Mapping[str, ListedObject], key: str) -> bytes | None:
    listed = objects.get(key)
    return None if listed is None else read_range(source, listed, 0, listed.num_bytes)


def single(  # noqa: PLR0913 - each of them is of the array
    uri: str, name: str, shape: Any, dtype: Any, read: Any, *, content: Content | None = None
) -> Found:
    """Return what has one array, whose dimensions have no names.

    Raises:
        InvalidParamsError: it is a single number, or no tensor can be made of it.
    """
    if not shape:
        msg = f"{uri} is a single number, and has no samples"
        raise InvalidParamsError(msg)
    dims = tuple(f"dim_{i}" for i in range(len(shape)))
    of_tensor = tensor_dtype(uri, dtype)
    only = Variable(name, dims, tuple(shape), of_tensor, None, read, content=content)
    return Found(uri, [only], {}, is_single=True)


@dataclass(frozen=True)
class _NpyFile:
    """A file of NumPy's, of which only the rows that are asked for are read."""

    source: Readable
    listed: ListedObject
    offset: int
    """Where its values begin."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    head: str
    """A digest of its first bytes, which were read with the header."""

    def content(self, used: Sequence[range]) -> str:
        """Tell the file from others, by its header and first values."""
        del used
        return self.head

    def __call__(self, box: Box) -> Array:
        start, stop, _ = box[0].indices(self.shape[0])
        row_bytes = self.dtype.itemsize * prod(self.shape[1:])
        first, last = (self.offset + row_bytes * row for row in (start, stop))
        content = read_range(self.source, self.listed, first, last)
        rows = np.frombuffer(content, self.dtype).reshape(stop - start, *self.shape[1:])
        # A part of the rows, if only that is used, without the rest of them.
        return np.ascontiguousarray(rows[(slice(None), *box[1:])])


@dataclass(frozen=True)
class _NpyParts:
    """Files that follow each other along the first dimension."""

    files: tuple[_NpyFile, ...]
    ends: tuple[int, ...]
    """The position after the last one of each file."""

    def content(self, used: Sequence[range]) -> str:
        """Tell the files from others, of those that have rows which are used."""
        del used
        return " ".join(file.head for file in self.files)

    def __call__(self, box: Box) -> Array:
        start, stop, _ = box[0].indices(self.ends[-1])
        found = []
        number = bisect_right(self.ends, start)
        while start < stop:
            end, before = (
                min(stop, self.ends[number]),
                self.ends[number] - self.files[number].shape[0],
            )
            found.append(self.files[number]((slice(start - before, end - before), *box[1:])))
            start, number = end, number + 1
        return found[0] if len(found) == 1 else np.concatenate(found)


def _opened(source: Readable, listed: ListedObject, uri: str) -> _NpyFile:
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
    digest = short_digest(head.getbuffer())
    return _NpyFile(source, listed, head.tell(), shape, dtype, digest)
