"""Writes a partition of a Bag on the Dask worker that computed it; loads no torch."""

import hashlib
import io
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from prefect_torch_ddp.data.arrays.statistics import measured
from prefect_torch_ddp.data.arrays.variables import tensor_dtype
from prefect_torch_ddp.data.bags.forms import DictRows, Stack
from prefect_torch_ddp.data.datasets.dataset_manifest import DatasetFile, Written
from prefect_torch_ddp.data.tables.writing import write_rows
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import Storage

ITEMS = "a Bag has to have dicts of plain values, or NumPy arrays of one shape and dtype"


def write_items(items: Iterable[Any], storage: Storage, files_key: str, number: int) -> Written:
    """Write a partition as a Parquet or a .npy file, as its items are; write none if it is empty.

    Each call chooses a new file name, as `write_partition` of tables does.

    Args:
        items: of the partition.
        storage: the dataset's storage.
        files_key: the folder of the files.
        number: the partition's number, by which the files are sorted.

    Returns:
        The file, and `DictRows` or `Stack` about it.

    Raises:
        InvalidParamsError: it can't be written; names the partition, the item and the key.
        StorageError: the storage failed.
    """
    given, where = list(items), f"partition {number} of the Dask Bag"
    if not given:
        return Written(())
    is_one = _is_array if _is_array(given[0]) else _is_dict
    for i, item in enumerate(given):
        if not is_one(item):
            but = f", and those before it {_kind(given[0])}" if i else ""
            msg = f"item {i} of {where} has the type {_kind(item)}{but}: {ITEMS}"
            raise InvalidParamsError(msg)
    if is_one is _is_array:
        return _write_arrays(given, storage, files_key, number, where)
    return _write_dicts(given, storage, files_key, number, where)


def rewrite_rows(
    key: str, storage: Storage, files_key: str, number: int, types: Mapping[str, Any]
) -> Written:
    """Write a partition of dicts again, with the columns and types that all partitions have.

    Args:
        key: of its Parquet file in the folder.
        storage: the dataset's storage.
        files_key: the folder of the files.
        number: the partition's number.
        types: the Arrow type of each column.

    Raises:
        InvalidParamsError: a value doesn't fit its column's type; names the partition and the key.
        StorageError: the storage failed.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.parquet as pq  # noqa: PLC0415

    rows = pq.read_table(pa.BufferReader(storage.read(f"{files_key}/{key}")))
    columns = {}
    for name, type_ in types.items():
        try:
            has = name in rows.column_names
            columns[name] = rows[name].cast(type_) if has else pa.nulls(len(rows), type_)
        except pa.ArrowException as error:
            msg = f"{name} of partition {number} of the Dask Bag can't be {type_}: {error}"
            raise InvalidParamsError(msg) from error
    return Written((write_rows(pa.table(columns), storage, files_key, number),))


def _is_dict(item: object) -> bool:
    return isinstance(item, dict)


def _is_array(item: object) -> bool:
    # The mask would be lost.
    return isinstance(item, np.ndarray) and not isinstance(item, np.ma.MaskedArray)


def _kind(item: object) -> str:
    return type(item).__qualname__


def _write_dicts(
    items: Sequence[Any], storage: Storage, files_key: str, number: int, where: str
) -> Written:
    import pyarrow as pa  # noqa: PLC0415 - an extra

    columns = {key: _column(items, key, where) for key in _keys(items, where)}
    file = write_rows(pa.table(columns), storage, files_key, number)
    return Written(
        (file,), DictRows(number, {key: (each.type, number) for key, each in columns.items()})
    )


def _keys(items: Sequence[dict[Any, Any]], where: str) -> list[str]:
    keys = list(dict.fromkeys(key for item in items for key in item))
    if not keys:
        msg = f"no item of {where} has a key: {ITEMS}"
        raise InvalidParamsError(msg)
    for key in keys:
        if not isinstance(key, str):
            number = next(i for i, item in enumerate(items) if key in item)
            msg = f"item {number} of {where} has the key {key!r}, which is no text"
            raise InvalidParamsError(msg)
    return keys


def _column(items: Sequence[dict[Any, Any]], key: str, where: str) -> Any:
    """Return the values of a key as an Arrow array; a null where an item lacks it."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    values = [item.get(key) for item in items]

    def why_not(num: int) -> str:
        """Say why the first values can't be a column of plain values."""
        try:
            type_ = pa.array(values[:num]).type
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            return str(error)
        return "it isn't a plain value" if pa.types.is_nested(type_) else ""

    if why_not(len(values)):
        num = 1 + bisect_left(range(1, len(values)), 1, key=lambda num: bool(why_not(num)))
        kind = _kind(values[num - 1])
        msg = f"{key} of item {num - 1} of {where} has the type {kind}: {why_not(num)}"
        raise InvalidParamsError(msg)
    return pa.array(values)


def _write_arrays(
    items: Sequence[Any], storage: Storage, files_key: str, number: int, where: str
) -> Written:
    dtype, shape = items[0].dtype, items[0].shape
    tensor_dtype(where, dtype)  # refuses one that no tensor has
    for i, item in enumerate(items):
        if (item.dtype, item.shape) != (dtype, shape):
            msg = (
                f"item {i} of {where} is an array of {item.dtype} and the shape {item.shape}, but "
                f"those before it are of {dtype} and the shape {shape}: make them equal"
            )
            raise InvalidParamsError(msg)
    head = io.BytesIO()
    of_file = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(head, {**of_file, "shape": (len(items), *shape)})
    # The file as it is stored, into which the items are copied once.
    content = np.empty(head.tell() + sum(item.nbytes for item in items), "uint8")
    content[: head.tell()] = np.frombuffer(head.getvalue(), "uint8")
    values = content[head.tell() :].view(dtype).reshape(len(items), *shape)
    np.stack(items, out=values)
    key = f"part-{number:06d}-{uuid.uuid4().hex[:8]}.npy"
    storage.write(f"{files_key}/{key}", content.data)
    digest = hashlib.sha256(content.data).hexdigest()
    file = DatasetFile(key=key, num_bytes=len(content), sha256=digest, num_rows=len(items))
    return Written((file,), Stack(number, str(dtype), shape, measured(values)))
