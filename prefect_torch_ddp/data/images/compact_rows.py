"""Compact columns of listed objects, in memory and in files: a million of them take 100 MB."""

import gzip
import hashlib
import json
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO, Generic, TypeVar

ROWS_PER_LINE = 1000

Row = TypeVar("Row")


class Texts:
    """Texts one after the other in one block of memory, and where each ends."""

    def __init__(self) -> None:
        self._block = bytearray()
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        return self.encoded(index).decode("utf-8", "surrogateescape")

    def encoded(self, index: int) -> bytes:
        """Return a text as it is stored."""
        return bytes(self._block[self._ends[index] : self._ends[index + 1]])

    def digest(self) -> str:
        """Return a digest of all texts in their order."""
        return hashlib.sha256(self._block + self._ends.tobytes()).hexdigest()

    def append(self, text: str) -> None:
        """Add a text."""
        self._block += encoded(text)
        self._ends.append(len(self._block))


class Columns(Generic[Row]):
    """Rows of texts and numbers, an array for each column: small, and shared by forks.

    Args:
        make: makes a row of its values.
        kinds: of the values.
    """

    def __init__(self, make: Callable[..., Row], kinds: Sequence[type]) -> None:
        self.columns: list[Any] = [Texts() if kind is str else array("q") for kind in kinds]
        self._make = make

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Row:
        at = range(len(self))[index]
        return self._make(*(column[at] for column in self.columns))

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    def append(self, values: Sequence[Any]) -> None:
        """Add a row.

        Raises:
            ValueError, TypeError, OverflowError: a value is of another kind.
        """
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


def encoded(text: str) -> bytes:
    """Return a text, or a file name that is no text, in UTF-8: so it sorts as S3 does."""
    return str.encode(text, "utf-8", "surrogateescape")


def write_rows(
    file: BinaryIO, head: dict[str, Any], names: Sequence[str], rows: Iterable[Sequence[Any]]
) -> int:
    """Write gzipped JSON lines: a head, columns of up to 1000 rows a line, the number of rows.

    Equal rows give equal bytes. Returns the number of rows.
    """
    num_rows, rest = 0, iter(rows)
    with gzip.GzipFile(fileobj=file, mode="wb", mtime=0, compresslevel=6) as lines:
        lines.write(_line(head))
        while some := list(islice(rest, ROWS_PER_LINE)):
            lines.write(_line(dict(zip(names, zip(*some, strict=True), strict=True))))
            num_rows += len(some)
        lines.write(_line({"num_rows": num_rows}))
    return num_rows


def read_rows(file: BinaryIO, names: Sequence[str]) -> Iterator[Any]:
    """Yield the head, and then each row, of a file that `write_rows` wrote.

    Raises:
        ValueError: the file is damaged or cut off, which may show after the last row only.
    """
    num_rows, announced = 0, None
    lines = gzip.GzipFile(fileobj=file)
    try:
        yield dict(json.loads(lines.readline()))
        for line in lines:  # compares a checksum where the file ends
            columns = json.loads(line)
            if "num_rows" in columns:
                announced = columns["num_rows"]
                continue
            num_rows += len(columns[names[0]])
            yield from zip(*(columns[name] for name in names), strict=True)
    except (OSError, EOFError, zlib.error, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
    if announced != num_rows:
        msg = f"it lists {num_rows} rows and announces {announced}"
        raise ValueError(msg)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
