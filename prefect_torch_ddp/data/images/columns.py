"""Compact columns of listed objects, in memory and in files: a million of them take 100 MB."""

import gzip
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO

from prefect_torch_ddp.storage.protocol import ListedObject

ROWS_PER_LINE = 1000


class TextColumn:
    """Texts one after the other in one block of memory, which forks share."""

    def __init__(self) -> None:
        self.block = bytearray()
        self.ends = array("Q", [0])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> str:
        return self.encoded(index).decode("utf-8", "surrogateescape")

    def encoded(self, index: int) -> bytes:
        """Return a text as it is stored."""
        return bytes(self.block[self.ends[index] : self.ends[index + 1]])

    def append(self, text: str) -> None:
        """Add a text."""
        self.block += encoded(text)
        self.ends.append(len(self.block))


class ObjectColumns:
    """Listed objects, in the order in which they were added."""

    def __init__(self) -> None:
        self.keys, self.sizes, self.etags = TextColumn(), array("Q"), TextColumn()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> ListedObject:
        return ListedObject(self.keys[index], self.sizes[index], self.etags[index])

    def __iter__(self) -> Iterator[ListedObject]:
        return map(self.__getitem__, range(len(self)))

    def append(self, item: ListedObject) -> None:
        """Add one."""
        self.keys.append(item.key)
        self.sizes.append(item.num_bytes)
        self.etags.append(item.etag)


def encoded(text: str) -> bytes:
    """Return a text, or a file name that is no text, in UTF-8: so it sorts as S3 does."""
    return text.encode("utf-8", "surrogateescape")


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
