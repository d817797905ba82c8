"""Writes a partition as Parquet on the Dask worker that computed it; loads no torch."""

import hashlib
import uuid
from collections.abc import Mapping
from typing import Any

from prefect_torch_ddp.data.datasets.dataset_manifest import DatasetFile, Written
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import Storage

_KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "M": "time", "m": "time"}
"""By NumPy's letter of a dtype. Others may be anything: Dask takes objects for texts."""
ROW_GROUP_ROWS = 16_384
"""Small enough that a window of `table()` mixes the rows of several row groups."""


def write_partition(
    frame: Any, storage: Storage, files_key: str, number: int, dtypes: Mapping[str, Any]
) -> Written:
    """Write a partition as a Parquet file; write none if it has no rows.

    What is said about it is the type of each column that may have any, with its kind.

    Each call chooses a new file name. Two workers may compute the same partition if one of them
    counts as lost; neither then overwrites the other's file.

    Args:
        frame: a pandas DataFrame; its index isn't written.
        storage: the dataset's storage.
        files_key: the folder of the files.
        number: the partition's number, by which the files are sorted.
        dtypes: the dtype of each column, as the meta of the whole DataFrame has it.

    Raises:
        InvalidParamsError: pyarrow can't write the frame, or a column is missing, or of another
            kind of type than in `dtypes` and can't be cast without loss; names the partition.
        StorageError: the storage failed.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    if not len(frame):
        return Written(())
    try:
        rows = pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise _unwritable(number, error) from error
    rows = _in_types_of_meta(rows, dtypes, number)
    free = {name for name, dtype in dtypes.items() if dtype.kind not in _KINDS}
    kinds = {each.name: (_kind(each.type), str(each.type)) for each in rows.schema}
    types = {name: kinds[name] for name in free if kinds[name][0] != "null"}
    return Written((write_rows(rows, storage, files_key, number),), types)


def write_rows(rows: Any, storage: Storage, files_key: str, number: int) -> DatasetFile:
    """Write a pyarrow.Table as a Parquet file; see `write_partition`."""
    import pyarrow as pa  # noqa: PLC0415 - an extra
    import pyarrow.parquet as pq  # noqa: PLC0415

    buffer = pa.BufferOutputStream()
    try:
        pq.write_table(
            rows,
            buffer,
            row_group_size=ROW_GROUP_ROWS,
            compression="zstd",
            # A dictionary of numbers costs more than it saves.
            use_dictionary=[field.name for field in rows.schema if not _is_number(field.type)],
        )
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise _unwritable(number, error) from error
    content = memoryview(buffer.getvalue())
    key = f"part-{number:06d}-{uuid.uuid4().hex[:8]}.parquet"
    storage.write(f"{files_key}/{key}", content)
    digest = hashlib.sha256(content).hexdigest()
    return DatasetFile(key=key, num_bytes=len(content), sha256=digest, num_rows=rows.num_rows)


def _in_types_of_meta(rows: Any, dtypes: Mapping[str, Any], number: int) -> Any:
    """Return a partition whose columns are of the kinds that its DataFrame says.

    Otherwise the files of its partitions would make no table. As in Dask's `to_parquet`, a column
    is cast, but only if no value is changed: neither texts nor booleans become numbers. Widths
    may differ between files, so they are kept.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    for name, dtype in dtypes.items():
        at = rows.schema.get_field_index(name)
        if at < 0:
            msg = (
                f"partition {number} of the Dask DataFrame lacks the column {name}, which is in "
                "the meta of the DataFrame: correct the function that makes it, or its meta"
            )
            raise InvalidParamsError(msg)
        column, wanted = rows.column(at), _KINDS.get(dtype.kind)
        if wanted is None and column.null_count == len(column):  # pandas has floats for no text
            rows = rows.set_column(at, name, pa.nulls(len(column)))
        if wanted is None or _kind(column.type) == wanted:
            continue
        try:
            rows = rows.set_column(at, name, _cast(column, dtype, wanted))
        except _OtherTypeError as error:
            msg = (
                f"column {name} of partition {number} of the Dask DataFrame is {column.type}, but "
                f"{dtype} in its meta: call astype({{{name!r}: ...}}) on the DataFrame, or correct "
                f"the meta ({error})"
            )
            raise InvalidParamsError(msg) from error
    return rows


class _OtherTypeError(Exception):
    """A column can't be cast without loss; says why."""


def _cast(column: Any, dtype: Any, wanted: str) -> Any:
    """Return a chunked column in the type of a dtype, of the kind `wanted`."""
    import numpy as np  # noqa: PLC0415 - comes with the extra
    import pandas as pd  # noqa: PLC0415 - an extra
    import pyarrow as pa  # noqa: PLC0415 - an extra

    found = _kind(column.type)
    type_ = pa.Array.from_pandas(pd.Series(dtype=dtype)).type
    has_nan = found == "float" and column.null_count > 0
    if has_nan and wanted in {"int", "bool"} and isinstance(dtype, np.dtype):
        msg = f"it has {column.null_count} missing values, which {dtype} can't hold"
        raise _OtherTypeError(msg)
    if column.null_count == len(column):  # pandas has objects for only None, and Dask texts
        return pa.nulls(len(column), type_)
    if {found, wanted} != {"int", "float"}:
        msg = "only integers and floats are converted into each other"
        raise _OtherTypeError(msg)
    try:
        return column.cast(type_)
    except pa.ArrowException as error:
        raise _OtherTypeError(str(error)) from error


def _kind(type_: Any) -> str:
    """Return the kind of an Arrow type."""
    from pyarrow import types  # noqa: PLC0415

    type_ = type_.value_type if types.is_dictionary(type_) else type_
    kinds = {
        "null": types.is_null,
        "bool": types.is_boolean,
        "int": types.is_integer,
        "float": types.is_floating,
        "time": types.is_temporal,
    }
    return next((kind for kind, is_one in kinds.items() if is_one(type_)), "other")


def _unwritable(number: int, error: Exception) -> InvalidParamsError:
    msg = f"partition {number} of the Dask collection can't be written as Parquet: {error}"
    return InvalidParamsError(msg)


def _is_number(type_: Any) -> bool:
    from pyarrow import types  # noqa: PLC0415

    return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_))
