"""`table()`: Parquet files as a dataset for `ctx.loader`."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.data.datasets.dataset_store import user_cache
from prefect_torch_ddp.data.images.location import Location
from prefect_torch_ddp.data.sampler import refuse_set, whole_number
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.storage.names import absolute_folder
from prefect_torch_ddp.storage.protocol import Readable

if TYPE_CHECKING:
    from prefect_torch_ddp.data.tables.dataset import CopiedTable, Table

SHUFFLE_BUFFER = 131_072
"""Rows that are shuffled together; up to two such windows are in memory."""
MIN_PYARROW = 22
"""pyarrow 20 and 21 lose rows by a filter with decimals."""


@exported_by("prefect_torch_ddp.data")
def table(  # noqa: PLR0913 - what is read, of which kind, and the way to a bucket, all by name
    where: Location | Sequence[str | Path],
    columns: Sequence[str] | AbstractSet[str] | None = None,
    *,
    features: Sequence[str] | None = None,
    target: str | Sequence[str] | None = None,
    categories: "Mapping[str, Sequence[str]] | Sequence[str]" = (),
    fill: Mapping[str, bool | float | str] | None = None,
    filters: Sequence[Any] | None = None,
    shuffle_buffer: int = SHUFFLE_BUFFER,
    local_copy: bool | str | Path = False,
    storage: Readable | None = None,
    anonymous: bool = False,
    endpoint_url: str | None = None,
    region: str | None = None,
) -> "Table | CopiedTable":
    """Return Parquet files as a dataset for `ctx.loader`.

    By default a batch is a dict of tensors [rows] by column, each with its column's dtype, except
    that uint16 becomes int32, and uint32, uint64 and the codes of categories become int64. With
    `features` and `target` a batch is (x, y): x is float32 [rows, features]; y is [rows] for one
    target and [rows, targets] for several. y is int64 for integers, booleans and categories, and
    float32 for floats. With `features` but no `target`, a batch is x. Only the named columns are
    read. If you pass a `collate_fn` to the loader, it is called with such a batch and returns the
    batch to use.

    The order is exact: each row comes once per epoch, in the same global batches for any number of
    ranks and loader workers. A resume in the middle of an epoch doesn't read earlier rows again.
    The row groups of all files are shuffled, and then the rows within windows of several row
    groups. Threads decode the next window in the background, so leave `num_workers` at 0: each
    worker process would decode for itself.

    With `local_copy` the rows are decoded once on each machine, into files on its disk that all
    ranks map. Rows are then shuffled over the whole table, and the dataset is an ordinary map-style
    one: `rows[i]`, torch's `Subset` and the loader's `weights` and `order` work. A rank holds only
    the order in memory, 4 bytes a row; the rows are in the kernel's page cache.

    Args:
        where: a folder with files at any depth (.parquet, .parq, .pq; sorted by name), a file,
            `s3://bucket/prefix`, a storage such as `ctx.source`, or a list of files in their
            order. With `storage`, paths in that storage. A path may be a file:// URI. Of a table of
            Delta Lake, Hudi or Iceberg, give the list of its current files, such as
            `DeltaTable(path).file_uris()`. A table with row-level deletes must be compacted first:
            its current files have the deleted rows too.
        columns: names of the columns to read, those of a set in the order of the alphabet; None:
            all except the index of pandas or Dask.
        features: names of the numeric columns that become x. A number too large for float32 is an
            error; if integers lose digits, a warning names the column.
        target: name or names of the columns that become y; needs `features`.
        categories: columns of texts, whose values become codes. Either a dict of the values of
            each column, in the order of their codes; any other value is an error. Or a list of
            columns: their values are first read from all rows, also those that `filters` drop,
            and sorted. Another table's may be others: to evaluate, pass `trained.categories` of the
            table that the model was trained on.
        fill: the value that replaces nulls, by column. A null in another column is an error.
        filters: which rows to read, as in pyarrow: `[("year", ">=", 2020)]`, all of which must
            hold, or a list of such lists, one of which must hold. A null never passes. Every rank
            reads the columns of the filters once, to count the rows.
        shuffle_buffer: largest number of rows in a window. A larger row group is a window by
            itself. A rank holds up to two windows in memory.
        local_copy: decode all rows into a copy on a local disk. True: below `XDG_CACHE_HOME`, else
            `~/.cache`. A path: in this folder. If a file or an argument changes, another
            copy is made. If the disk has too little room, copies that no process uses are removed.
        storage: the storage to read from, with its credentials.
        anonymous: send unsigned requests, for public data.
        endpoint_url: URL of an S3 store other than AWS.
        region: region of the bucket.

    Raises:
        InvalidParamsError: pyarrow is missing or too old; arguments contradict each other; there
            is no file or no row; a folder is of Delta Lake, Hudi or Iceberg; files disagree on a
            column's kind (integers, floats, booleans or texts, of any width); a column can't become
            a tensor (nested, decimal, temporal, binary); or the local copy doesn't fit the disk.
            Names the file and the column. With `local_copy`, nulls and unknown texts are found here
            too.
        StorageError: a file can't be read, or isn't Parquet; or the copy can't be written.

    Example:
        Batches (x, y) of Parquet files that `prepare` wrote:

            from prefect_torch_ddp.data import table

            rows = table(ctx.data, features=["age", "income"], target="bought")
            for x, y in ctx.steps(ctx.loader(rows, global_batch_size=1024), epochs=5):
                print(x.shape, y.shape)
    """
    _require_pyarrow()
    _check(categories, fill)
    refuse_set("features", features)
    refuse_set("target", target)
    # A batch is a dict, where the order doesn't count, but it has to be the same on all ranks.
    names = sorted(columns, key=str) if isinstance(columns, AbstractSet) else columns
    buffer = whole_number("shuffle_buffer", shuffle_buffer, 1)
    copies = _folder_of_copies(local_copy)
    if copies is not None and buffer != SHUFFLE_BUFFER:
        msg = "shuffle_buffer has no effect with local_copy, which shuffles all rows: leave it out"
        raise InvalidParamsError(msg)
    # They load pyarrow.
    from prefect_torch_ddp.data.tables import (  # noqa: PLC0415
        choices,
        dataset,
        parquet_files,
        pieces,
    )
    from prefect_torch_ddp.data.tables.local_copy import open_copy  # noqa: PLC0415

    ways = {"anonymous": anonymous, "endpoint_url": endpoint_url, "region": region}
    found = parquet_files.find_files(where, storage, **ways)

    def opened() -> pieces.TablePieces:
        footed = parquet_files.with_footers(found)
        chosen = choices.chosen_names(footed[0], names, features, target)
        resolved = choices.resolved_columns(footed, chosen.names, categories, fill or {})
        return pieces.TablePieces(footed, resolved, chosen.form(resolved), filters)

    if copies is None:
        return dataset.Table(opened(), buffer)
    asked = {
        "columns": names,
        "features": features,
        "target": target,
        "categories": categories,
        "fill": fill,
        "filters": filters,
    }
    return dataset.CopiedTable(open_copy(copies, found, asked, opened))


def _check(categories: object, fill: object) -> None:
    for name, values in categories.items() if isinstance(categories, Mapping) else ():
        refuse_set(f"categories[{name!r}]", values)
    if isinstance(categories, str):
        msg = (
            f"categories is {categories!r}; give a list of columns, such as [{categories!r}], or a "
            "dict of the values of each column"
        )
        raise InvalidParamsError(msg)
    if fill is not None and not isinstance(fill, Mapping):
        msg = f"fill is {fill!r}; give a dict by column, such as {{'age': 0}}"
        raise InvalidParamsError(msg)


def _folder_of_copies(local_copy: bool | str | Path) -> Path | None:  # noqa: FBT001 - or a folder
    """Return the folder for copies; None if there is to be none."""
    if local_copy is False:
        return None
    if local_copy is True:
        return user_cache() / "tables"
    if not str(local_copy):
        msg = "local_copy is an empty path: give a folder on a local disk, or True"
        raise InvalidParamsError(msg)
    return absolute_folder(local_copy)


def _require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: PLC0415 - an extra
    except ImportError as error:
        msg = (
            "table() needs pyarrow, which can't be imported: `pip install pyarrow`, or install "
            "prefect-torch-ddp with its extra `tables`"
        )
        raise InvalidParamsError(msg) from error
    if int(pyarrow.__version__.partition(".")[0]) < MIN_PYARROW:
        msg = (
            f"table() needs pyarrow {MIN_PYARROW} or newer, and {pyarrow.__version__} is "
            f"installed: `pip install 'pyarrow>={MIN_PYARROW}'`. Older ones filter decimals wrongly"
        )
        raise InvalidParamsError(msg)
