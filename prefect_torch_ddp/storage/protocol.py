"""What the package asks of a storage, and the answers that are right for a simple one.

To add a storage, answer the six abstract questions of `Storage` in a frozen, picklable class, and
name its URI scheme: CONTRIBUTING.md says how. The other questions have answers here. Nobody
outside this folder asks which class a storage has: a new difference between storages is a new
question, with an answer here for all storages that don't have it.
"""

import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from prefect_torch_ddp.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.storage.names import check_key, check_prefix

CHANGED = (
    "changed since it was listed: list it again, by running prepare again, "
    "or keep data in use unchanged"
)
"""Error text for an object that isn't the listed one any more."""


@exported_by("prefect_torch_ddp")
@dataclass(frozen=True)
class StoredObject:
    """One object as `Storage.list` shows it.

    Example:
        How much a run has stored:

            from prefect_torch_ddp import storage_from_uri

            storage = storage_from_uri("runs")
            print(sum(found.num_bytes for found in storage.list(f"runs/{run_id}/")))
    """

    key: str
    """Relative to the storage's root, with forward slashes."""
    num_bytes: int


@exported_by("prefect_torch_ddp")
@dataclass(frozen=True, slots=True)
class ListedObject:
    """One object as datasets list it.

    Example:
        The files of a source:

            for each in ctx.source.list_objects(""):
                print(each.key, each.num_bytes)
    """

    key: str
    """Relative to the storage's root; any name that is found there (`cats/`, `a//b`)."""
    num_bytes: int
    etag: str
    """Changes with the content: S3's ETag without quotes, or for a file its time and size."""


@exported_by("prefect_torch_ddp")
@dataclass(frozen=True, slots=True)
class ObjectPart:
    """What is to be read: an object, or a range of one.

    Example:
        The first 8 bytes of a file:

            from prefect_torch_ddp import ObjectPart, storage_from_uri

            storage = storage_from_uri("notes")
            storage.write("b.txt", b"the first and the rest")
            print(storage.read_many([ObjectPart("b.txt", 8, start=0)]))  # [b'the firs']
    """

    key: str
    num_bytes: int
    """Number of bytes to read; for a whole object, its size."""
    start: int | None = None
    """Offset of the range in bytes. None: the whole object."""
    etag: str | None = None
    """The listed etag. If the object has another one now, `read_many` returns an
    `ObjectChangedError` instead of the bytes. None: it isn't compared."""


Contents: TypeAlias = list[bytes | StorageError]
"""The content or the error of each part, in order."""


@exported_by("prefect_torch_ddp")
class Readable(ABC):
    """A source of a dataset: a storage, or a layer in front of one, such as a cache.

    Any name that a listing returns can be read.

    Example:
        Count the files of a run's source, wherever it is:

            print(ctx.source.uri, sum(1 for _ in ctx.source.list_objects("")))
    """

    @property
    @abstractmethod
    def uri(self) -> str:
        """The root as users write it, a path or `s3://bucket/prefix`, without any secret.

        Append `/` and a folder's key to get the folder's URI, e.g. of a run, dataset or model.
        """

    @abstractmethod
    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts, concurrently if that helps. If a part fails, its value is the error.

        Values are in the order of the parts, each of exactly `num_bytes` bytes. The method is
        thread-safe. A call without parts loads what later calls need: forks inherit it, and invalid
        settings raise at once.
        """

    @abstractmethod
    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name begins with the string `prefix`, sorted by name."""

    def list_level(self, prefix: str) -> Iterator[ListedObject | str]:
        """Yield what `list_objects` yields, but a folder's name in place of all objects in it.

        The name begins with `prefix` and ends with a slash. A storage that can list single folders
        yields such names, so that the caller can list several folders concurrently. By default all
        objects are yielded.
        """
        return self.list_objects(prefix)

    @property
    def identity(self) -> str:
        """Identifies the storage: its URI, and the endpoint if the URI doesn't have it."""
        return self.uri

    @property
    def local_folder(self) -> Path | None:
        """The folder whose files are its objects, by their keys; None if there is none."""
        return None

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """With which Dask, pandas and xarray, by fsspec, open `uri`: endpoint and credentials.

        They hold secrets, if the storage was given some. Dask sends them to its workers. None: it
        is opened without, as a folder is.

        Example:
            Read the source of a run by Dask, wherever it is:

                rows = dd.read_parquet(ctx.source.uri, storage_options=ctx.source.storage_options)
        """
        return None


@exported_by("prefect_torch_ddp")
class Storage(Readable):
    """A root under which objects are written whole and read whole.

    Implementations are small picklable descriptions, equal if they describe the same: they hold
    no open client, so a Storage may be sent to another process or cross a fork. Keys are relative
    and can't leave the root: `check_key` raises `BadKeyError` for others. Whatever else fails is
    a `StorageError` that names the object, the reason and a remedy.

    It is a base class and no typing.Protocol: a later version can add a method with a default, and
    storages that others wrote continue to work.

    Example:
        Write an object that only one of several processes may write:

            from prefect_torch_ddp import storage_from_uri

            storage = storage_from_uri("notes")
            if storage.write_if_absent("owner.txt", b"me"):
                print("mine:", storage.read("owner.txt"))
    """

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Return the whole object; raise `ObjectNotFoundError` if there is none."""

    @abstractmethod
    def write(self, key: str, data: bytes | memoryview) -> None:
        """Write the whole object, replacing what was there.

        Readers see the old or the new content, never a part. A view is only valid during the call.
        """

    @abstractmethod
    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Write the object unless one exists; return whether this call wrote it.

        Exactly one of several racing callers wins.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield the whole objects whose key begins with the string `prefix`, in key order."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete the object; deleting an absent one is no error."""

    def check_writable(self) -> None:
        """Write a small object if it is absent, try that again, and read, list and delete it.

        Raises:
            StorageError: the storage failed, or the second write replaced the object; says what to
                do.
        """
        first = b"first"
        with trial_object(self) as key:
            won, won_again = (self.write_if_absent(key, data) for data in (first, b"second"))
            is_kept = won and not won_again and self.read(key) == first
            for _ in self.list(key):
                pass
        if not is_kept:
            msg = (
                f"{self.uri} doesn't honour conditional writes (If-None-Match: *): two runs could "
                "commit the same checkpoint. Use a store that does, such as AWS S3, Ceph or a "
                "current MinIO, or a directory"
            )
            raise StorageError(msg)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """See `Readable.read_many`; whole objects, one after the other."""
        return [_part_or_error(self, part) for part in parts]

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """See `Readable.list_objects`; reads each object, since its digest is the ETag.

        A storage that knows its objects' ETags without reading them can override this to be
        faster, and then `read_many` too, which compares the ETags.
        """
        for found in self.list(prefix):
            with suppress(ObjectNotFoundError):  # deleted meanwhile
                data = self.read(found.key)
                yield ListedObject(found.key, len(data), _etag(data))

    def open_file(self, key: str) -> BinaryIO | None:  # noqa: ARG002 - the answer for all keys
        """Open an object's file, unbuffered, which may be mapped into memory instead of copied.

        None if objects are no files. Raises the same errors as `read`.
        """
        return None

    @property
    def is_shared_by_hosts(self) -> bool:
        """Whether this description means the same objects on every host.

        If not, each host may have its own folder of that name. To check, write an object on one
        host and read it on the others.
        """
        return self.local_folder is None

    def below(self, folder: str) -> "Storage":
        """Return a folder, named by a key, as a storage; raise `BadKeyError` for a bad key."""
        return StorageBelow(self, check_key(folder))

    def relocated(self, uri: str) -> "Storage | None":  # noqa: ARG002 - the answer for all URIs
        """Return the storage of another URI, with this storage's endpoint and credentials.

        None if they don't apply to that URI; the storage is then opened by its URI only.
        """
        return None

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        """Delete unfinished writes below `prefix`, whose writers were killed.

        They are in no listing and can't be read. Delete only those of objects for which
        `is_over(key)` is true: nobody writes these any more.
        """


@dataclass(frozen=True)
class StorageBelow(Storage):
    """A folder of any storage, as a storage."""

    storage: Storage
    folder: str

    @property
    def uri(self) -> str:
        """The folder's."""
        return f"{self.storage.uri.rstrip('/')}/{self.folder}"

    @property
    def identity(self) -> str:
        """The folder's."""
        return f"{self.storage.identity.rstrip('/')}/{self.folder}"

    def read(self, key: str) -> bytes:
        """See `Storage.read`."""
        return self.storage.read(self._outer(check_key(key)))

    def write(self, key: str, data: bytes | memoryview) -> None:
        """See `Storage.write`."""
        self.storage.write(self._outer(check_key(key)), data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """See `Storage.write_if_absent`."""
        return self.storage.write_if_absent(self._outer(check_key(key)), data)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """See `Storage.list`."""
        listed = self.storage.list(self._outer(check_prefix(prefix)))
        return (replace(found, key=self._inner(found.key)) for found in listed)

    def delete(self, key: str) -> None:
        """See `Storage.delete`."""
        self.storage.delete(self._outer(check_key(key)))

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """See `Readable.read_many`."""
        return self.storage.read_many([replace(p, key=self._outer(p.key)) for p in parts])

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """See `Readable.list_objects`."""
        listed = self.storage.list_objects(self._outer(prefix))
        return (replace(found, key=self._inner(found.key)) for found in listed)

    def relocated(self, uri: str) -> Storage | None:
        """See `Storage.relocated`."""
        return self.storage.relocated(uri)

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        """See `Storage.drop_unfinished`."""
        self.storage.drop_unfinished(self._outer(prefix), lambda key: is_over(self._inner(key)))

    @property
    def is_shared_by_hosts(self) -> bool:
        """See `Storage.is_shared_by_hosts`."""
        return self.storage.is_shared_by_hosts

    def _outer(self, key: str) -> str:
        return f"{self.folder}/{key}"

    def _inner(self, key: str) -> str:
        return key.removeprefix(f"{self.folder}/")


@contextmanager
def trial_object(storage: Storage) -> Iterator[str]:
    """Give the key of an object to try a storage with, and delete the object at the end.

    Nobody knows that object: a StorageError names the storage in its place.
    """
    key = f"probes/{uuid.uuid4().hex}"
    try:
        try:
            yield key
        except BaseException:
            with suppress(StorageError):  # the first fault is the one to report
                storage.delete(key)
            raise
        storage.delete(key)
    except StorageError as error:
        error.args = tuple(map(partial(_without, key), error.args))
        raise


def _without(key: str, text: str) -> str:
    """Return an error's text with the root in place of its object, or with the object's folder."""
    return text.replace(f"/{key}", "/").replace(key, key.partition("/")[0])


def _part_or_error(storage: Storage, part: ObjectPart) -> bytes | StorageError:
    try:
        data = storage.read(part.key)
    except StorageError as error:
        return error
    start = part.start or 0
    content = data if part.start is None else data[start : start + part.num_bytes]
    is_another = part.etag is not None and part.etag != _etag(data)
    if is_another or len(content) != part.num_bytes:
        return ObjectChangedError(f"can't read {part.key} in {storage.uri}: the object {CHANGED}")
    return content


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
