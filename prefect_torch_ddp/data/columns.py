"""Owns compact columns of listed objects: a few arrays, so a million of them are 100 MB, and forks share the memory."""

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prefect_torch_ddp.storage.objects import ListedObject


class TextColumn:
    """Texts one behind the other in one block of memory."""

    def __init__(self) -> None:
        """Begin with none."""
        self._block = bytearray()
        self._ends = array("Q", [0])

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        """Return a text; the index counts from 0."""
        return self._block[self._ends[index] : self._ends[index + 1]].decode("utf-8", "surrogateescape")

    def append(self, text: str) -> None:
        """Add a text."""
        self._block += text.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._block))

    def extend(self, other: "TextColumn") -> None:
        """Add all of another column's."""
        block, ends = other._block, other._ends  # noqa: SLF001 - of the same class
        shift = len(self._block)
        self._block += block
        self._ends.extend([end + shift for end in ends[1:]])

    def __getstate__(self) -> tuple[bytes, bytes]:
        """Pickle small."""
        lengths = array("I", (self._ends[i + 1] - self._ends[i] for i in range(len(self))))
        return zlib.compress(self._block, 1), zlib.compress(lengths, 1)

    def __setstate__(self, state: tuple[bytes, bytes]) -> None:
        """Unpickle."""
        block, lengths = state
        self._block = bytearray(zlib.decompress(block))
        self._ends = array("Q", [0])
        end = 0
        self._ends.extend([end := end + length for length in array("I", zlib.decompress(lengths))])


class ObjectColumns:
    """Listed objects, in the order in which they were added."""

    def __init__(self, objects: Iterable[ListedObject] = ()) -> None:
        """Take them."""
        self._keys, self._sizes, self._etags = TextColumn(), array("Q"), TextColumn()
        for item in objects:
            self.append(item)

    def __getstate__(self) -> tuple[TextColumn, bytes, TextColumn]:
        """Pickle small."""
        return self._keys, zlib.compress(self._sizes.tobytes(), 1), self._etags

    def __setstate__(self, state: tuple[TextColumn, bytes, TextColumn]) -> None:
        """Unpickle."""
        self._keys, sizes, self._etags = state
        self._sizes = array("Q", zlib.decompress(sizes))

    def __len__(self) -> int:
        """Return their number."""
        return len(self._sizes)

    def __getitem__(self, index: int) -> ListedObject:
        """Return one; the index counts from 0."""
        return ListedObject(self._keys[index], self._sizes[index], self._etags[index])

    def __iter__(self) -> Iterator[ListedObject]:
        """Yield all."""
        return map(self.__getitem__, range(len(self)))

    def append(self, item: ListedObject) -> None:
        """Add one."""
        self._keys.append(item.key)
        self._sizes.append(item.num_bytes)
        self._etags.append(item.etag)

    def key(self, index: int) -> str:
        """Return the key alone."""
        return self._keys[index]

    def extend(self, other: "ObjectColumns") -> None:
        """Add all of another's."""
        keys, sizes, etags = other._keys, other._sizes, other._etags  # noqa: SLF001 - of the same class
        self._keys.extend(keys)
        self._sizes.extend(sizes)
        self._etags.extend(etags)

    def sorted(self, by: Callable[[str], Any]) -> "ObjectColumns":
        """Return the same objects in the order of a function of their keys."""
        order = sorted(range(len(self)), key=lambda index: by(self._keys[index]))
        return ObjectColumns(map(self.__getitem__, order))
