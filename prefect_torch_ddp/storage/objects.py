"""Owns the seam by which datasets read: many objects at once, parts of objects, and the names that others gave them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from prefect_torch_ddp.errors import StorageError


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object as a listing shows it."""

    key: str
    """Relative to the storage's root; as it is, also where it is no key by our own rules (`cats/`, `a//b`)."""
    num_bytes: int
    etag: str
    """Changes with the content: S3's ETag without quotes, or for a file its time and size."""


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """What is to be read: an object, or a range of one."""

    key: str
    num_bytes: int
    """How much; of a whole object its size."""
    start: int | None = None
    """Where the range begins; None: the whole object."""
    etag: str | None = None
    """What it had when it was listed: another one by now is an `ObjectChangedError`. None: whatever is there."""


Contents: TypeAlias = list[bytes | StorageError]
"""What came of the parts, in their order."""


@runtime_checkable
class ReadsMany(Protocol):
    """What a storage also has that serves datasets. It only reads, so a key may be any name that is found there."""

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts, concurrently where that helps; the values come in the parts' order, and a failure is that part's value.

        Threads may call it at the same time. A value has exactly `num_bytes`.
        """
        ...

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name begins with `prefix` (a string prefix), sorted by name."""
        ...


class Readable(ReadsMany, Protocol):
    """Where a dataset is read from: a storage, or what stands in front of one, such as a cache."""

    @property
    def uri(self) -> str:
        """The root as a person would write it; holds no secret."""
        ...


@runtime_checkable
class ListsLevels(Protocol):
    """What a storage also has that can list one level of its names, so that the folders below are listed side by side."""

    def list_level(self, prefix: str) -> Iterator[ListedObject | str]:
        """Yield the objects whose name goes on without a slash after `prefix`, and the folders (`prefix` to slash), sorted."""
        ...
