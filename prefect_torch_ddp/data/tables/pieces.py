"""The pieces of a table: row groups that are decoded together, and the rows left by filters."""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, islice
from operator import and_, or_
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import torch

from prefect_torch_ddp.data.datasets.dataset_manifest import in_parallel
from prefect_torch_ddp.data.tables.columns import Column, nulls_refused
from prefect_torch_ddp.data.tables.form import Array, Form
from prefect_torch_ddp.data.tables.parquet_files import TableFile, names_below
from prefect_torch_ddp.data.traits import Trait, spread, values_at
from prefect_torch_ddp.errors import InvalidParamsError, StorageError

logger = logging.getLogger(__name__)

PIECE_ROWS = 8192
"""Consecutive row groups form one piece of up to this many rows, since tiny ones cost too much."""
MAX_LOOKS = 20_000
"""Largest number of footer entries that are checked for nulls before anything is read."""

EXACT_IN_FLOAT32 = 2**24
"""Float32 has each integer up to this one."""

Filters = Sequence[Any]


@dataclass(frozen=True)
class Piece:
    """Consecutive row groups of a file, which are decoded together."""

    file: int
    groups: range
    num_rows: int
    """Number of rows that pass the filters."""
    first_id: int
    """Number of the piece's first row in the table."""


class TablePieces:
    """The rows of a table's files, in pieces that are decoded one by one.

    Args:
        files: the files with their footers, in order.
        columns: the columns that are read, by name.
        form: the form of the batches.
        filters: filters in the form that pyarrow's `read_table` takes.

    Raises:
        InvalidParamsError: there is no row, or a null without a fill value.
        StorageError: a file can't be read.
    """

    def __init__(
        self,
        files: Sequence[TableFile],
        columns: Mapping[str, Column],
        form: Form,
        filters: Filters | None,
    ) -> None:
        self.files, self.columns, self.form = files, columns, form
        self._filters = filters
        self._filtered_by = columns_of(filters)
        self._rounded: set[str] = set()
        for file in files:
            self._check_filters(file)
        if filters is None:
            self._refuse_known_nulls()
        self.pieces = self._count()
        if not self.pieces:
            what = "no row passes the filters" if filters else "there is no row"
            msg = f"the table of {len(files)} files from {files[0].uri} on can't be used: {what}"
            raise InvalidParamsError(msg)

    def _check_filters(self, file: TableFile) -> None:
        """Refuse filters on columns that the file lacks, or with values of another type."""
        if self._filters is None:
            return
        types = {name: file.type_of(name) for name in self._filtered_by}
        try:
            # A row, since kernels compare, and refuse what they can't, only if there is one.
            nulls = {name: pa.nulls(1, type_) for name, type_ in types.items()}
            pa.table(nulls).filter(expression(self._filters))
        except (pa.ArrowException, TypeError) as error:
            raise self._unfit(file, error) from error

    def _unfit(self, file: TableFile, error: Exception) -> InvalidParamsError:
        has = ", ".join(f"{name} is {file.type_of(name)}" for name in self._filtered_by)
        msg = f"filters {self._filters!r} don't fit {file.uri}, in which {has}: {error}"
        return InvalidParamsError(msg)

    @property
    def traits(self) -> dict[str, list[Trait]]:
        """A few names and sizes of files, and what numbers mean: equal on all ranks."""
        some = spread(len(self.files))
        names = [file.listed.key for file in self.files]
        rows = [file.metadata.num_rows for file in self.files]
        meaning = self.form.meaning({name: each.values for name, each in self.columns.items()})
        found = {"files": values_at(names, some), "rows of files": values_at(rows, some)}
        for name, digest in meaning.items():
            found[name] = [digest]
        return found

    @property
    def layout(self) -> str:
        """A digest of the sizes of all pieces, which determine the order, and of their files.

        Names are those in the folder that has all files, and ETags don't count: a copied table is
        the same.
        """
        digest = hashlib.sha256()
        names = names_below(self.files)
        for piece in self.pieces:
            file = self.files[piece.file]
            row = repr((names[piece.file], file.listed.num_bytes, file.footer, piece.num_rows))
            digest.update(row.encode(errors="surrogatepass"))
        return f"files with the digest {digest.hexdigest()[:12]}"

    def __len__(self) -> int:
        return self.pieces[-1].first_id + self.pieces[-1].num_rows

    def room_for(self, pieces: Sequence[int]) -> "DecodedTable":
        """Return what the rows of these pieces are decoded into."""
        return DecodedTable(self, pieces)

    def decode(self, number: int, arrays: Sequence[Array], start: int) -> None:
        """Decode a piece into the arrays of the form's blocks, beginning at row `start`.

        Raises:
            InvalidParamsError: the piece has nulls without a fill value, or an unknown value.
            StorageError: the piece can't be read.
        """
        for at, rows in self._batches(number):
            first = start + at
            own = [array[first : first + rows.num_rows] for array in arrays]
            self._fill(rows, own, self._where(number))

    def decode_chunks(self, number: int) -> Iterator[tuple[int, list[Array]]]:
        """Yield a piece's rows, some thousands at a time; raises as `decode` does.

        Yields:
            The number of the first of these rows in the table, and an array [rows, columns] for
            each block of the form.
        """
        for at, rows in self._batches(number):
            arrays = self.form.new_arrays(rows.num_rows)
            self._fill(rows, arrays, self._where(number))
            yield self.pieces[number].first_id + at, arrays

    def _batches(self, number: int) -> Iterator[tuple[int, Any]]:
        """Yield a piece's rows as pyarrow.Tables, each with the number of its first row there.

        A table has at least one row.
        """
        piece, at = self.pieces[number], 0
        for rows in self._read(piece.file, piece.groups, list(self.columns)):
            if rows.num_rows and at + rows.num_rows <= piece.num_rows:
                yield at, rows
            at += rows.num_rows
        if at != piece.num_rows:
            where, counted = self._where(number), piece.num_rows
            msg = f"{where} have {at} rows, but {counted} were counted: replace it"
            raise StorageError(msg)

    def _where(self, number: int) -> str:
        piece = self.pieces[number]
        groups = f"row groups {piece.groups.start} to {piece.groups.stop - 1}"
        return f"{self.files[piece.file].uri}, {groups},"

    def _fill(self, rows: Any, arrays: Sequence[Array], where: str) -> None:
        for block, array in zip(self.form.blocks, arrays, strict=True):
            for i, name in enumerate(block.columns):
                numbers = self.columns[name].numbers(rows[name], where)
                with np.errstate(over="ignore"):
                    array[:, i] = numbers
                if array.dtype == np.float32 and numbers.dtype.kind in "iuf":
                    self._check_float32(name, numbers, array[:, i], where)

    def _check_float32(self, name: str, numbers: Array, found: Array, where: str) -> None:
        """Refuse a number that became infinite; warn once of a column's integer that is rounded."""
        if numbers.dtype.kind == "f":
            if numbers.dtype == np.float64 and np.isinf(found).any():
                _refuse_infinite(name, numbers, found, where)
        elif numbers.dtype.itemsize >= found.itemsize and name not in self._rounded:
            # Only of large numbers is each one looked at.
            if not len(numbers) or max(numbers.max(), -int(numbers.min())) <= EXACT_IN_FLOAT32:
                return
            changed = np.flatnonzero(found != numbers)
            if len(changed):
                self._rounded.add(name)
                text = (
                    "column %s of %s has %d, which float32 rounds to %d: subtract an offset in "
                    "prepare if the last digits matter, or read it by columns="
                )
                at = changed[0]
                logger.warning(text, name, where, numbers[at], found[at])

    def _read(self, number: int, groups: Sequence[int], names: Sequence[str]) -> Iterator[Any]:
        """Yield the rows of row groups that pass the filters, as pyarrow.Tables."""
        wanted = list(dict.fromkeys([*names, *self._filtered_by]))
        texts = [
            name
            for name, column in self.columns.items()
            if column.kind == "category" and name in wanted and name not in self._filtered_by
        ]
        for rows in self.files[number].tables(groups, wanted, texts):
            yield rows if self._filters is None else rows.filter(expression(self._filters))

    def _count(self) -> list[Piece]:
        """Return the pieces that have rows. To count with filters, their columns are read."""
        whole = list(self._cut())
        if self._filters is None:
            counts = [sum(self.files[n].sizes[g] for g in groups) for n, groups in whole]
        else:
            kept = in_parallel(self._kept_groups, range(len(self.files)))

            def count(piece: tuple[int, range]) -> int:
                number, groups = piece
                some = [group for group in groups if group in kept[number]]
                return sum(rows.num_rows for rows in self._read(number, some, [])) if some else 0

            counts = in_parallel(count, whole)
        firsts = accumulate(counts, initial=0)
        return [
            Piece(n, groups, num, first)
            for (n, groups), num, first in zip(whole, counts, firsts, strict=False)
            if num
        ]

    def _cut(self) -> Iterator[tuple[int, range]]:
        for n, file in enumerate(self.files):
            start = rows = 0
            for group, size in enumerate(file.sizes):
                if group > start and rows + size > PIECE_ROWS:
                    yield n, range(start, group)
                    start, rows = group, 0
                rows += size
            if rows:
                yield n, range(start, len(file.sizes))

    def _kept_groups(self, number: int) -> set[int]:
        """Return the row groups that may have passing rows, by the statistics in the footer."""
        file, filters = self.files[number], self._filters or ()
        for name, how, _ in _conditions(filters):
            # NaN passes, but statistics leave it out: by them, 3 and NaN are only 3.
            if how in {"!=", "in", "not in"} and pa.types.is_floating(file.type_of(name)):
                return {*range(len(file.sizes))}
        whole = pads.ParquetFileFormat().make_fragment(file.as_python_file())
        try:
            fragments = whole.split_by_row_group(expression(filters))
        except pa.ArrowException as error:
            raise self._unfit(file, error) from error
        return {group.id for fragment in fragments for group in fragment.row_groups}

    def _refuse_known_nulls(self) -> None:
        """Refuse nulls that a footer reports; others are found when they are read."""
        unfilled = {name for name, column in self.columns.items() if column.fill is None}
        looks = (
            (file, schema_column.path, file.metadata.row_group(group).column(i))
            for file in self.files
            for i, schema_column in enumerate(_leaves(file))
            if schema_column.path in unfilled
            for group in range(file.metadata.num_row_groups)
        )
        for file, name, chunk in islice(looks, MAX_LOOKS):
            known = chunk.statistics if chunk.is_stats_set else None
            if known is not None and known.has_null_count and known.null_count:
                raise InvalidParamsError(nulls_refused(name, known.null_count, file.uri))


class DecodedTable:
    """The decoded rows of some pieces, in one array for each block of the form.

    Args:
        table: the rows.
        pieces: the numbers of the pieces, in the order of their rows.
    """

    def __init__(self, table: TablePieces, pieces: Sequence[int]) -> None:
        ends = list(accumulate((table.pieces[piece].num_rows for piece in pieces), initial=0))
        self._table = table
        self._starts = dict(zip(pieces, ends, strict=False))
        self._arrays = table.form.new_arrays(ends[-1])

    def decode(self, number: int) -> None:
        """Decode a piece; raises as `TablePieces.decode` does."""
        self._table.decode(number, self._arrays, self._starts[number])

    def take(self, rows: Array) -> list[torch.Tensor]:
        """Return rows of each block's array, copied: tensors [rows, columns]."""
        index = torch.from_numpy(rows)
        return [torch.from_numpy(array).index_select(0, index) for array in self._arrays]


def _refuse_infinite(name: str, numbers: Array, found: Array, where: str) -> None:
    became = np.flatnonzero(np.isinf(found) & np.isfinite(numbers))
    if len(became):
        msg = (
            f"column {name} of {where} has {numbers[became[0]]}, which is too large for float32: "
            "scale it in prepare, or read it by columns="
        )
        raise InvalidParamsError(msg)


def _leaves(file: TableFile) -> Iterator[Any]:
    schema = file.metadata.schema
    return (schema.column(i) for i in range(len(schema)))


def expression(filters: Filters) -> Any:
    """Return filters as an expression of pyarrow.

    Raises:
        InvalidParamsError: the filters aren't valid.
    """
    try:
        for condition in _conditions(filters):
            _refuse_letters(*condition)
        # Users give filters as lists: an expression doesn't say which columns it needs.
        pq.filters_to_expression(list(filters))
        many = [filters] if isinstance(filters[0][0], str) else filters
        return reduce(or_, (reduce(and_, map(_without_null, each)) for each in many))
    except (ValueError, TypeError, OverflowError, IndexError, pa.ArrowException) as error:
        msg = f"filters {filters!r} can't be used: {error}; write [(column, '==', value), ...]"
        raise InvalidParamsError(msg) from error


def _without_null(condition: Any) -> Any:
    # Otherwise a null isn't in a list, and None is.
    return pq.filters_to_expression([condition]) & pc.field(condition[0]).is_valid()


def _refuse_letters(name: object, how: object, value: object) -> None:
    if how in ("in", "not in") and isinstance(value, str | bytes):
        # pyarrow would take it for the set of its letters.
        msg = f"({name!r}, {how!r}, {value!r}) takes a list: [{value!r}]"
        raise ValueError(msg)


def columns_of(filters: Filters | None) -> list[str]:
    """Return the names of the columns that filters use."""
    if filters is None:
        return []
    expression(filters)
    return list(dict.fromkeys(name for name, *_ in _conditions(filters)))


def _conditions(filters: Filters) -> list[Any]:
    return [each for one in filters for each in ([one] if isinstance(one, tuple) else one)]
