"""`table()`: Parquet files as a dataset for `ctx.loader`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.data.images.location import Location
from prefect_torch_ddp.data.sampler import whole_number
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import Readable

if TYPE_CHECKING:
    from prefect_torch_ddp.data.tables.columns import Value
    from prefect_torch_ddp.data.tables.dataset import Table

SHUFFLE_BUFFER = 131_072
"""Rows that are shuffled among one another, and of which two such windows are in memory."""


def table(  # noqa: PLR0913 - what is read, of which kind, and the way to a bucket, all by name
    where: Location | Sequence[str | Path],
    columns: Sequence[str] | None = None,
    *,
    features: Sequence[str] | None = None,
    target: str | Sequence[str] | None = None,
    categories: "Mapping[str, Sequence[str]] | Sequence[str]" = (),
    fill: "Mapping[str, Value] | None" = None,
    filters: Sequence[Any] | None = None,
    shuffle_buffer: int = SHUFFLE_BUFFER,
    storage: Readable | None = None,
    anonymous: bool = False,
    endpoint_url: str | None = None,
    region: str | None = None,
) -> "Table":
    """Return Parquet files as a dataset for `ctx.loader`.

        rows = table(ctx.data, features=["age", "income"], target="bought")
        for x, y in ctx.steps(ctx.loader(rows, global_batch_size=1024), epochs=5): ...

    A batch is a dict of tensors [rows] by column. With `features` it is (x, y): x float32 [rows,
    features], and y [rows] of one target, [rows, targets] of several; without a target x. Only
    these columns are read. y is int64 where the target is whole numbers, booleans or a category,
    else float32. A `collate_fn` of the loader is given such a batch, and what it returns is the
    batch.

    The order is exact: every row once an epoch, in the same global batches on any number of ranks
    and of loader workers, and a resume in the middle reads nothing of what came before. The row
    groups of all files are shuffled, and the rows within windows of several row groups. Threads
    decode the next window meanwhile, so leave `num_workers` at 0: each worker decodes for itself.

    Args:
        where: a folder with files at any depth (.parquet, .parq, .pq; sorted by name), a file,
            `s3://bucket/prefix`, a storage such as `ctx.source`, or a list of files in their
            order. With `storage`, paths in that.
        columns: names of what is read; None: all, but for pandas' and Dask's index.
        features: names of numbers that become x.
        target: name or names of what becomes y; needs `features`.
        categories: columns of texts, which become codes: the values that each may have, in the
            order of their codes; a value that isn't there is an error. Or only the columns' names:
            then they are read once for their values, which are sorted, before any filter.
        fill: what a null becomes, by column. Any other null is an error.
        filters: which rows are read, as pyarrow takes them: `[("year", ">=", 2020)]`, or a list of
            such lists, one of which has to hold. A null never passes. Every rank reads the columns
            that they name once, to count.
        shuffle_buffer: most rows of a window. A row group that is larger is a window of its own,
            and a rank holds up to two windows.
        storage: what to read from, with its credentials.
        anonymous: whether requests aren't signed, as for public data.
        endpoint_url: of a store other than AWS.
        region: of the bucket.

    Raises:
        InvalidParamsError: pyarrow is missing; arguments don't fit together; there is no file or
            no row; files don't agree on a column, or one can't be a tensor (nested, decimal,
            temporal, binary): names file and column.
        StorageError: a file can't be read, or isn't Parquet.
    """
    _require_pyarrow()
    # They load pyarrow.
    from prefect_torch_ddp.data.tables import choices, dataset, files, pieces  # noqa: PLC0415

    found = files.with_footers(
        files.find_files(
            where, storage, anonymous=anonymous, endpoint_url=endpoint_url, region=region
        )
    )
    chosen = choices.chosen_names(found[0], columns, features, target)
    resolved = choices.resolved_columns(found, chosen.names, categories, fill or {})
    buffer = whole_number("shuffle_buffer", shuffle_buffer, 1)
    rows = pieces.TablePieces(found, resolved, chosen.form(resolved), filters)
    return dataset.Table(rows, buffer)


def _require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: PLC0415, F401 - an extra
    except ImportError as error:
        msg = (
            "table() needs pyarrow, which can't be loaded: `pip install pyarrow`, or install "
            "prefect-torch-ddp with its extra `tables`"
        )
        raise InvalidParamsError(msg) from error
