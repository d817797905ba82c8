"""Writes a partition as Parquet on the Dask worker that computed it; loads no torch."""

import hashlib
import uuid
from typing import Any

from prefect_torch_ddp.data.dataset_manifest import DatasetFile, Written
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import Storage

ROW_GROUP_ROWS = 16_384
"""Small enough that a window of `table()` mixes the rows of several row groups."""


def write_part(frame: Any, storage: Storage, files_key: str, number: int) -> Written:
    """Write a partition as a Parquet file; write none if it has no rows.

    Each call chooses a new file name. Two workers may compute the same partition if one of them
    counts as lost; neither then overwrites the other's file.

    Args:
        frame: a pandas DataFrame; its index isn't written.
        storage: the dataset's storage.
        files_key: the folder of the files.
        number: the partition's number, by which the files are sorted.

    Raises:
        InvalidParamsError: pyarrow can't write the frame; names the partition.
        StorageError: the storage failed.
    """
    import pyarrow as pa  # noqa: PLC0415 - an extra

    if not len(frame):
        return Written(())
    try:
        rows = pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise _unwritable(number, error) from error
    return Written((write_rows(rows, storage, files_key, number),))


def write_rows(rows: Any, storage: Storage, files_key: str, number: int) -> DatasetFile:
    """Write a pyarrow.Table as a Parquet file; see `write_part`."""
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


def _unwritable(number: int, error: Exception) -> InvalidParamsError:
    msg = f"partition {number} of the Dask collection can't be written as Parquet: {error}"
    return InvalidParamsError(msg)


def _is_number(type_: Any) -> bool:
    from pyarrow import types  # noqa: PLC0415

    return bool(types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_))
