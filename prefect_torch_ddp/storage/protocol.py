"""The protocols of a storage: what the package needs from a place that keeps bytes; its keys.

To add a storage: write a frozen, picklable class with the methods of `Storage`, and of the other
protocols here that it can serve (`Readable` for datasets). Run the suite
`tests/support/storage_conformance.py` against it. Add its URI scheme to `locate.py`, which turns
strings into storages, and its folders to `storage_below` there.
"""

import re
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, Protocol, TypeAlias, runtime_checkable

from prefect_torch_ddp.errors import BadKeyError, StorageError

MAX_KEY_BYTES = 900  # S3 allows 1024 for the storage's prefix and the key together
MAX_PART_BYTES = 255  # the longest file name of common file systems
MAX_SHOWN = 120
_USUAL_PART = rf"\w[\w.=-]{{0,{MAX_PART_BYTES - 1}}}"
_USUAL_KEY = re.compile(rf"{_USUAL_PART}(/{_USUAL_PART})*", re.ASCII)
"""What nearly all keys are: a dataset's manifest may have hundreds of thousands."""
RESERVED_PART = ".tmp"  # where a directory keeps what isn't whole yet
CHANGED = (
    "changed since it was listed: list it again, by running prepare again, "
    "or keep data in use unchanged"
)
"""What is said of an object that isn't the listed one any more."""


def check_key(key: str) -> str:
    """Return a key that every storage can hold and that can't leave its root, as it is.

    `BadKeyError` says what is wrong with any other.
    """
    if (fault := _fault(key)) is not None:
        msg = f"{_shown(key)} can't be the key of an object: {fault}; write it like folder/name"
        raise BadKeyError(msg)
    return key


def check_prefix(prefix: str) -> str:
    """Return the prefix as it is, or raise `BadKeyError` where no key can begin with it."""
    if (fault := _fault(f"{prefix}x")) is not None:
        msg = f"no key can begin with {_shown(prefix)}: {fault}; write it like folder/"
        raise BadKeyError(msg)
    return prefix


def is_key(name: str) -> bool:
    """Return whether a name is a key; others, which someone else put there, aren't listed."""
    return _fault(name) is None


def _shown(key: str) -> str:
    return repr(key) if len(key) <= MAX_SHOWN else f"{key[:MAX_SHOWN]!r}..."


def _fault(key: str) -> str | None:
    if len(key) <= MAX_KEY_BYTES and _USUAL_KEY.fullmatch(key):
        return None
    parts, num_bytes = key.split("/"), len(key.encode(errors="replace"))
    faults = {
        "it is empty": not key,
        "it is absolute": key.startswith("/"),
        "it begins with a drive": re.match(r"[A-Za-z]:", key),
        "it has a backslash": "\\" in key,
        "it has a control character or half a character": any(
            unicodedata.category(character) in {"Cc", "Cs"} for character in key
        ),
        f"it has {num_bytes} bytes, and {MAX_KEY_BYTES} are allowed": num_bytes > MAX_KEY_BYTES,
        "a part between its slashes is empty": "" in parts,
        "a part of it is '.' or '..'": "." in parts or ".." in parts,
        f"{RESERVED_PART} is where unfinished files lie": parts[0] == RESERVED_PART,
        f"a part of it has more than {MAX_PART_BYTES} bytes": any(
            len(part.encode(errors="replace")) > MAX_PART_BYTES for part in parts
        ),
    }
    return next((fault for fault, applies in faults.items() if applies), None)


@dataclass(frozen=True)
class StoredObject:
    """One object as `Storage.list` shows it."""

    key: str
    """Relative to the storage's root, with forward slashes."""
    num_bytes: int


@runtime_checkable
class Storage(Protocol):
    """A root under which objects are written whole and read whole.

    Implementations are small picklable descriptions: they hold no open client, so a Storage may be
    sent to another process or cross a fork. Keys are relative and can't leave the root:
    `check_key` raises `BadKeyError` for others. Whatever else fails is a `StorageError` that
    names the object, the reason and a remedy.
    """

    @property
    def uri(self) -> str:
        """The root as a person writes it, a path or `s3://bucket/prefix`; holds no secret."""
        ...

    def read(self, key: str) -> bytes:
        """Return the whole object; raise `ObjectNotFoundError` where there is none."""
        ...

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Write the whole object, replacing what was there.

        Readers see the old or the new, never a part. A view is only valid during the call.
        """
        ...

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Write the object unless one exists; return whether this call wrote it.

        Exactly one of several racing callers wins.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield the whole objects whose key begins with the string `prefix`, in key order."""
        ...

    def delete(self, key: str) -> None:
        """Delete the object; deleting an absent one is no error."""
        ...

    def check_writable(self) -> None:
        """Raise a `StorageError` that says what to do where `probe` fails."""
        ...


@runtime_checkable
class KeepsUnfinished(Protocol):
    """A storage where a killed writer leaves a part of an object that nobody can read."""

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        """Drop such parts below `prefix` where `is_over(key)` says that nobody writes them."""
        ...


@runtime_checkable
class HasFiles(Protocol):
    """A storage whose objects are files that may be mapped into memory instead of copied."""

    def open_file(self, key: str) -> BinaryIO:
        """Open the object, unbuffered; raises `ObjectNotFoundError`."""
        ...


@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object as datasets list it."""

    key: str
    """Relative to the storage's root; any name that is found there (`cats/`, `a//b`)."""
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
    """What was listed: another one by now is an `ObjectChangedError`. None: whatever is there."""


Contents: TypeAlias = list[bytes | StorageError]
"""What came of the parts, in their order."""


@runtime_checkable
class Readable(Protocol):
    """Where a dataset is read from: a storage, or what stands in front of one, such as a cache.

    Any name that is found there may be read.
    """

    @property
    def uri(self) -> str:
        """The root as a person would write it; holds no secret."""
        ...

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts, concurrently where that helps; a failure is that part's value.

        Values come in the parts' order, each of exactly `num_bytes`. Threads may call it at once.
        """
        ...

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name begins with the string `prefix`, sorted by name."""
        ...


def probe(storage: Storage) -> None:
    """Write, conditionally write, read, list and delete a small object.

    Raises:
        StorageError: the storage failed, or ignores the condition; says what to do.
    """
    key, first = f"probes/{uuid.uuid4().hex}", b"first"
    try:
        won, won_again = (storage.write_if_absent(key, data) for data in (first, b"second"))
        is_kept = won and not won_again and storage.read(key) == first
        list(storage.list(key))
    except Exception:
        with suppress(StorageError):  # the first fault is the one to report
            storage.delete(key)
        raise
    storage.delete(key)
    if not is_kept:
        msg = (
            f"{storage.uri} doesn't honour conditional writes (If-None-Match: *): two runs could "
            "commit the same checkpoint. Use a store that does, such as AWS S3, Ceph or a current "
            "MinIO, or a directory"
        )
        raise StorageError(msg)
