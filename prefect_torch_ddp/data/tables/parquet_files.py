"""The Parquet files of a table: finding them, reading their footers and some of their columns.

pyarrow decodes. The bytes come through `Readable.read_many`, so any storage and cache can serve
them, and a file that was replaced since it was listed is an error.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_torch_ddp.data.datasets.dataset_manifest import in_parallel
from prefect_torch_ddp.data.images.listing import list_dataset
from prefect_torch_ddp.data.images.location import Location, local_path, readable_at
from prefect_torch_ddp.data.preparing import PARQUET_SUFFIXES, is_parquet, refuse_log
from prefect_torch_ddp.data.sampler import short_digest
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.storage.locate import is_path
from prefect_torch_ddp.storage.protocol import ListedObject, ObjectPart, Readable

FOOTER_BYTES = 64 * 2**10
"""Bytes that are first read from each file's end; a larger footer takes a second request."""
NUM_FOOTERS = 256
"""Footers that are read at a time."""
GAP_BYTES = 64 * 2**10
"""A gap of up to this size between two wanted columns is read along with them."""
SMALL_BYTES = 2**20
"""Row groups of up to this size together are read whole, not column by column."""
ROWS_AT_ONCE = 32_768
MAX_NAMES = 20
"""Largest number of columns that an error names."""
MIN_BYTES = 12
"""A Parquet file's least size: the magic bytes at both ends, and the length of its footer."""
_END, _LENGTH_BYTES = b"PAR1", 8

Found = tuple[Readable, ListedObject]


def find_files(
    where: Location | Sequence[str | Path], storage: Readable | None, **ways: Any
) -> list[Found]:
    """Return the files of a table: a folder's sorted by name, a list's in its order.

    Files and folders whose name begins with a dot or an underscore are left out, such as _SUCCESS
    and _metadata.

    Raises:
        InvalidParamsError: there is no file; or a folder is, or has in it, a table of Delta Lake,
            Hudi or Iceberg, which also keeps files that no longer count.
        StorageError: the files can't be listed.
    """
    if isinstance(where, str | Path) or not isinstance(where, Iterable):
        return _find(where, storage, ways)
    if not where:
        msg = "table() was given an empty list of files: give at least one"
        raise InvalidParamsError(msg)
    many = in_parallel(lambda each: _find(each, storage, ways), where)
    return [found for each in many for found in each]


def _find(where: Location, storage: Readable | None, ways: Mapping[str, Any]) -> list[Found]:
    if isinstance(where, str) and (storage is None or not where.startswith(storage.uri)):
        where = local_path(where)
    name = str(where) if isinstance(where, str | Path) else ""
    if storage is None and name.lower().endswith(PARQUET_SUFFIXES):  # a file, or a folder named so
        if is_path(name):
            above, name = str(Path(name).parent), Path(name).name
        else:
            above, _, name = name.rpartition("/")
        source, prefix = readable_at(above, None, **ways)[0], name
    else:
        source, prefix = readable_at(where, storage, **ways)
        prefix = prefix.rstrip("/")
    is_folder = prefix and not prefix.lower().endswith(PARQUET_SUFFIXES)
    found = list_dataset(source, f"{prefix}/" if is_folder else prefix)
    what = f"{source.uri.rstrip('/')}/{prefix}".rstrip("/")
    listed = [item for item in found if _is_in(item.key, prefix, what)]
    if not listed:
        ends = ", ".join(PARQUET_SUFFIXES)
        msg = f"there is no Parquet file in {what}: a name must end with {ends}"
        raise InvalidParamsError(msg)
    return [(source, item) for item in listed]


def _is_in(key: str, prefix: str, uri: str) -> bool:
    """Tell whether a listed file is one of the table's; see `refuse_log` for what it refuses."""
    if key == prefix:
        return True
    if prefix and not key.startswith(f"{prefix}/"):
        return False  # a neighbour whose name begins the same way
    below = key.removeprefix(prefix).lstrip("/")
    refuse_log(below, uri)
    return is_parquet(below)


@dataclass(frozen=True)
class TableFile:
    """A Parquet file with its footer."""

    source: Readable
    listed: ListedObject
    metadata: Any
    """A pyarrow.parquet.FileMetaData."""
    footer: str
    """A digest of the file's last bytes, which have the least and largest values: the footer, and
    as much as was read with it."""

    @property
    def uri(self) -> str:
        """The file as a person writes it."""
        return f"{self.source.uri.rstrip('/')}/{self.listed.key}"

    @cached_property
    def schema(self) -> Any:
        """The columns with their Parquet types; types of Arrow and pandas are ignored."""
        return self.metadata.schema.to_arrow_schema()

    @cached_property
    def sizes(self) -> list[int]:
        """The rows of each row group."""
        metadata = self.metadata
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]

    def type_of(self, name: str) -> Any:
        """Return the Arrow type of a column.

        Raises:
            InvalidParamsError: no column has this name, or several have it.
        """
        schema = self.schema
        found = schema.get_all_field_indices(name)
        if len(found) != 1:
            what = f"{len(found)} columns" if found else "no column"
            names = ", ".join(schema.names[:MAX_NAMES])
            names += ", ..." if len(schema.names) > MAX_NAMES else ""
            msg = f"{self.uri} has {what} of the name {name!r}; there are {names}"
            raise InvalidParamsError(msg)
        return schema.field(found[0]).type

    def tables(
        self, groups: Sequence[int], columns: Sequence[str], texts: Sequence[str] = ()
    ) -> Iterator[Any]:
        """Yield the rows of some row groups, some thousands at a time, as a pyarrow.Table.

        Starts no thread. In memory are the columns' compressed bytes and one such table.

        Args:
            groups: numbers of the row groups.
            columns: names of plain columns.
            texts: those of `columns` that are read as Arrow dictionaries.

        Raises:
            StorageError: the rows can't be read or decoded.
        """
        ranges = list(self._ranges(groups, set(columns)))
        file = _RangesOfFile(self._fetch, self.listed.num_bytes, ranges)
        try:
            reader = pq.ParquetFile(
                pa.PythonFile(file, mode="r"),
                metadata=self.metadata,
                read_dictionary=list(texts),
                pre_buffer=False,
            )
            for batch in reader.iter_batches(
                ROWS_AT_ONCE, row_groups=list(groups), columns=list(columns), use_threads=False
            ):
                yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            msg = f"{self.uri} can't be decoded: {error}; replace it"
            raise StorageError(msg) from error

    def as_python_file(self) -> Any:
        """Return a file from which pyarrow can read anything; each read is a request."""
        return pa.PythonFile(_RangesOfFile(self._fetch, self.listed.num_bytes, []), mode="r")

    def _fetch(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read ranges, (start, end) each."""
        key, etag = self.listed.key, self.listed.etag
        parts = [ObjectPart(key, end - start, start, etag) for start, end in ranges]
        return _whole(self.source.read_many(parts))

    def _ranges(self, groups: Sequence[int], columns: set[str]) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges of the columns of row groups; neighbours are joined."""
        schema, row_group = self.metadata.schema, self.metadata.row_group
        wanted = [i for i in range(len(schema)) if schema.column(i).path in columns]
        starts = [_range_of(row_group(groups[0]).column(i))[0] for i in range(len(schema))]
        ends = [_range_of(row_group(groups[-1]).column(i))[1] for i in range(len(schema))]
        if starts and 0 <= max(ends) - min(starts) <= SMALL_BYTES:
            yield min(starts), max(ends)
            return
        start = end = -1
        for low, high in sorted(_range_of(row_group(g).column(i)) for g in groups for i in wanted):
            if start >= 0 and low - end > GAP_BYTES:
                yield start, end
                start = -1
            start, end = (low, high) if start < 0 else (start, max(end, high))
        if start >= 0:
            yield start, end


def _range_of(chunk: Any) -> tuple[int, int]:
    first = chunk.dictionary_page_offset
    start = min(chunk.data_page_offset, first) if first else chunk.data_page_offset
    return start, start + chunk.total_compressed_size


def _whole(contents: Sequence[bytes | StorageError]) -> list[bytes]:
    """Return the parts; raise the first failure."""
    read = []
    for content in contents:
        if isinstance(content, StorageError):
            raise content
        read.append(content)
    return read


def with_footers(found: Sequence[Found]) -> list[TableFile]:
    """Read the footers of files.

    Raises:
        StorageError: a file can't be read, or isn't a Parquet file.
    """
    for each in found:
        if each[1].num_bytes < MIN_BYTES:
            raise _no_parquet(each, "the file is too small")
    files = []
    for i in range(0, len(found), NUM_FOOTERS):
        some = found[i : i + NUM_FOOTERS]
        tails = _tails(some, [FOOTER_BYTES] * len(some))
        sizes = [_footer_bytes(tail, each) for each, tail in zip(some, tails, strict=True)]
        large = [n for n, size in enumerate(sizes) if size > len(tails[n])]
        again = _tails([some[n] for n in large], [sizes[n] for n in large])
        for n, tail in zip(large, again, strict=True):
            tails[n] = tail
        files += [_file(each, tail) for each, tail in zip(some, tails, strict=True)]
    return files


def _tails(found: Sequence[Found], sizes: Sequence[int]) -> list[bytes]:
    """Read the last bytes of files, with one call for each source, all at once."""
    tails: list[bytes] = [b""] * len(found)
    by_source: dict[int, list[int]] = {}
    for n, (source, _) in enumerate(found):
        by_source.setdefault(id(source), []).append(n)

    def read(numbers: list[int]) -> None:
        parts = []
        for n in numbers:
            item = found[n][1]
            size = min(sizes[n], item.num_bytes)
            parts.append(ObjectPart(item.key, size, item.num_bytes - size, item.etag))
        contents = _whole(found[numbers[0]][0].read_many(parts))
        for n, tail in zip(numbers, contents, strict=True):
            tails[n] = tail

    in_parallel(read, by_source.values())
    return tails


def _footer_bytes(tail: bytes, found: Found) -> int:
    if not tail.endswith(_END):
        raise _no_parquet(found, "its end isn't that of a Parquet file")
    return int.from_bytes(tail[-_LENGTH_BYTES:-4], "little") + _LENGTH_BYTES


def _file(found: Found, tail: bytes) -> TableFile:
    try:
        metadata = pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowException, OSError) as error:
        raise _no_parquet(found, str(error)) from error
    return TableFile(*found, metadata, short_digest(tail))


def names_below(files: Sequence[TableFile]) -> list[str]:
    """Return the names of files that tell them apart, in the folder that has them all.

    So files of equal names in several folders differ, and a table that was moved stays the same.
    """
    folders = [file.source.uri.rstrip("/").split("/") for file in files]
    levels = takewhile(lambda level: len({*level}) == 1, zip(*folders, strict=False))
    shared = len(list(levels))
    return [
        "/".join([*folder[shared:], file.listed.key])
        for folder, file in zip(folders, files, strict=True)
    ]


def _no_parquet(found: Found, why: str) -> StorageError:
    source, item = found
    size = f"{item.num_bytes} bytes"
    return StorageError(
        f"{source.uri.rstrip('/')}/{item.key} ({size}) can't be read as Parquet: {why}; replace "
        "or remove it"
    )


class _RangesOfFile:
    """A file for pyarrow whose needed ranges were all read in one call."""

    closed = False

    def __init__(
        self,
        fetch: Callable[[Sequence[tuple[int, int]]], list[bytes]],
        num_bytes: int,
        ranges: Sequence[tuple[int, int]],
    ) -> None:
        self._fetch = fetch
        self._num_bytes = num_bytes
        self._starts = [start for start, _ in ranges]
        self._parts = [memoryview(part) for part in (fetch(ranges) if ranges else ())]
        self._at = 0

    def read(self, num_bytes: int = -1) -> bytes:
        """Return the next bytes."""
        rest = self._num_bytes - self._at
        size = rest if num_bytes < 0 else min(num_bytes, rest)
        if size <= 0:
            return b""
        start, self._at = self._at, self._at + size
        n = bisect_right(self._starts, start) - 1
        offset = start - self._starts[n] if n >= 0 else -1
        if offset >= 0 and offset + size <= len(self._parts[n]):
            return bytes(self._parts[n][offset : offset + size])
        return self._fetch([(start, start + size)])[0]

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position; return it."""
        self._at = offset + (0, self._at, self._num_bytes)[whence]
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def size(self) -> int:
        """Return the file's size in bytes."""
        return self._num_bytes

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that any place can be read."""
        return True

    def writable(self) -> bool:
        """Say that it can't be written."""
        return False

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: nothing is open."""
