"""The read-through cache: objects of a remote storage, kept on local disk and checked there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from prefect_torch_ddp.data.images.cache_folder import folder_of
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.directory import absolute_folder
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, Readable

MAX_BYTES = 50 * 2**30


@dataclass(frozen=True)
class CachedReads:
    """Reads objects through a folder on local disk; has the methods of what it reads from.

    Any number of this user's processes may share a folder, with the same storages or others.
    What is read from it was verified when it arrived (by its ETag where that is an MD5) and is
    verified again, by a SHA-256. A damaged file is fetched again, with a warning. Objects
    without an ETag aren't kept, since nobody could tell whether they changed. Where the folder
    can't be used, or the disk is full, reading goes on without it, with one warning a process.
    """

    storage: Readable
    """Where the objects are."""
    folder: Path
    """On a local disk; made where there is none, for this user alone. `~` is expanded."""
    max_bytes: int = MAX_BYTES
    """Of all storages in the folder together. A twentieth of the disk, at most 4 GiB, is left
    free in any case."""

    def __post_init__(self) -> None:
        if not hasattr(self.storage, "read_many"):
            msg = (
                "a cache needs a storage that datasets read from (a directory or S3), "
                f"and got {type(self.storage).__name__}"
            )
            raise InvalidParamsError(msg)
        if self.max_bytes < 1:
            msg = (
                f"the cache's max_bytes is {self.max_bytes}; "
                f"give the bytes that {self.folder} may hold, such as 50 * 2**30"
            )
            raise InvalidParamsError(msg)
        object.__setattr__(self, "folder", absolute_folder(self.folder))

    @property
    def uri(self) -> str:
        """Where the objects are, as a person would write it."""
        return self.storage.uri

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts, those in the folder from there; a failure is that part's value."""
        folder = folder_of(str(self.folder / "v1"), _where(self.storage), self.max_bytes)
        if folder is None:
            return self.storage.read_many(parts)
        found = [folder.get(part) if part.etag else None for part in parts]
        missing = [number for number, data in enumerate(found) if data is None]
        if not missing:
            return cast("Contents", found)
        fetched = self.storage.read_many([parts[number] for number in missing])
        arrived = dict(zip(missing, fetched, strict=True))
        folder.put(
            [
                (parts[number], data)
                for number, data in arrived.items()
                if parts[number].etag and isinstance(data, bytes)
            ]
        )
        return [arrived[n] if data is None else data for n, data in enumerate(found)]

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name begins with `prefix`, as the storage says now."""
        return self.storage.list_objects(prefix)


def _where(storage: Readable) -> str:
    """Name what a storage reads from; holds no secret.

    Two stores may have one name where a profile's settings, not the storage or the environment,
    say which endpoint it is. They then share a folder: an entry still counts only for the size
    and ETag that were listed.
    """
    inner: object = storage
    while (behind := getattr(inner, "storage", None)) is not None:  # of shards
        inner = behind
    return f"{storage.uri} at {getattr(inner, 'endpoint', None)}"
