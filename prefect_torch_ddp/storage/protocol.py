"""Owns the storage seam: the handful of questions the rest of the package asks of a place for
bytes.

Owns the seam by which datasets read: many objects at once, parts of objects, and the names that
others gave them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeAlias, runtime_checkable

from prefect_torch_ddp.errors import StorageError


@dataclass(frozen=True)
class StoredObject:
    """One object as a listing shows it."""

    key: str
    """Relative to the storage's root, with forward slashes."""
    num_bytes: int


@runtime_checkable
class Storage(Protocol):
    """A root under which objects are written whole and read whole.

    Implementations are small picklable descriptions: they hold no open client, so a Storage may
    be sent to another process or cross a fork. Keys are relative, use forward slashes, and
    can't leave the root: `BadKeyError` is raised for an absolute key, a drive, a backslash, an
    empty part, `.` or `..`.
    """

    @property
    def uri(self) -> str:
        """The root as a person would write it (an absolute path or `s3://bucket/prefix`); holds
        no secret.
        """
        ...

    def read(self, key: str) -> bytes:
        """Return the whole object; raise `ObjectNotFoundError` where there is none."""
        ...

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Write the whole object, replacing what was there; readers see the old or the new,
        never a part.

        A view is only valid during the call.
        """
        ...

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Write the object unless one exists; return whether this call wrote it.

        Exactly one of several racing callers wins.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose key begins with `prefix` (a string prefix), in key order;
        half-written ones never show.
        """
        ...

    def delete(self, key: str) -> None:
        """Delete the object; deleting an absent one is no error."""
        ...

    def check_writable(self) -> None:
        """Write, conditionally write, read and delete a small probe; raise a `StorageError`
        that says what to do.
        """
        ...


@runtime_checkable
class KeepsUnfinished(Protocol):
    """What a storage also has where a writer that is killed leaves a part of an object: nobody
    can read it, and it takes room.
    """

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        """Drop the parts of objects below `prefix` of which `is_over(key)` says that nobody
        writes them any more.
        """
        ...


@runtime_checkable
class ShowsContent(Protocol):
    """What a storage also has that can show content as it arrives, so that it is hashed while
    it is read.
    """

    def read_seen(self, key: str, see: Callable[[memoryview], object]) -> memoryview:
        """Return the whole object as `read` does, and call `see` with each part of it, in
        order.
        """
        ...


@runtime_checkable
class HasFiles(Protocol):
    """What a storage also has whose objects are files that may be mapped into memory, so that
    nothing is copied to be read.
    """

    def open_file(self, key: str) -> BinaryIO | None:
        """Open the object, whose content stays what it is until the file is closed and no
        mapping of it is left.

        None where the file system can't promise that; raises `ObjectNotFoundError` where there
        is no such object.
        """
        ...


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object as a listing shows it."""

    key: str
    """Relative to the storage's root; as it is, also where it is no key by our own rules
    (`cats/`, `a//b`)."""
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
    """What it had when it was listed: another one by now is an `ObjectChangedError`.

    None: whatever is there.
    """


Contents: TypeAlias = list[bytes | StorageError]
"""What came of the parts, in their order."""


@runtime_checkable
class ReadsMany(Protocol):
    """What a storage also has that serves datasets.

    It only reads, so a key may be any name that is found there.
    """

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts, concurrently where that helps; the values come in the parts' order,
        and a failure is that part's value.

        Threads may call it at the same time. A value has exactly `num_bytes`.
        """
        ...

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name begins with `prefix` (a string prefix), sorted by
        name.
        """
        ...


class Readable(ReadsMany, Protocol):
    """Where a dataset is read from: a storage, or what stands in front of one, such as a
    cache.
    """

    @property
    def uri(self) -> str:
        """The root as a person would write it; holds no secret."""
        ...


@runtime_checkable
class ListsLevels(Protocol):
    """What a storage also has that can list one level of its names, so that the folders below
    are listed side by side.
    """

    def list_level(self, prefix: str) -> Iterator[ListedObject | str]:
        """Yield the objects whose name goes on without a slash after `prefix`, and the folders
        (`prefix` to slash), sorted.
        """
        ...
