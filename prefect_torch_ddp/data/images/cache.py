"""Owns the read-through cache: what was fetched from a remote storage is kept on local disk,
and checked at each read.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from prefect_torch_ddp.data.images.cache_folder import SourceInCache, folder_of
from prefect_torch_ddp.errors import InvalidParamsError, StorageError
from prefect_torch_ddp.storage.directory import absolute_folder
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, ReadsMany

MAX_BYTES = 50 * 2**30


@dataclass(frozen=True)
class CachedReads:
    """Reads objects through a folder on local disk; has the methods of what it reads from, and
    is as small to pickle.

    Any number of this user's processes may share a folder, with the same sources or others.
    What is read from it was verified when it arrived (by its ETag where that is an MD5) and is
    verified again, by a SHA-256 of our own. A damaged file is fetched again, with a warning.
    Parts without an ETag aren't kept, since nobody could tell whether they changed. Where the
    folder can't be used, or the disk is full, reading goes on without it, and a warning says so
    once in a process.
    """

    storage: ReadsMany
    """Where the objects are."""
    folder: Path
    """On a local disk; made where there is none, for this user alone. `~` is expanded."""
    max_bytes: int = MAX_BYTES
    """How much all sources together may hold in the folder.

    A twentieth of the disk, at most 4 GiB, is left free in any case.
    """

    def __post_init__(self) -> None:
        if not callable(getattr(self.storage, "read_many", None)):
            msg = f"a cache needs a storage that datasets read from (a directory or S3), and got {type(self.storage).__name__}"
            raise InvalidParamsError(msg)
        if self.max_bytes < 1:
            msg = f"the cache's max_bytes is {self.max_bytes}; give the bytes that {self.folder} may hold, such as 50 * 2**30"
            raise InvalidParamsError(msg)
        object.__setattr__(self, "folder", absolute_folder(self.folder))

    @property
    def uri(self) -> str:
        """Where the objects are, as a person would write it."""
        return str(getattr(self.storage, "uri", type(self.storage).__name__))

    @property
    def content_id(self) -> str:
        """What the cache's entries are told apart by."""
        return content_id(self.storage)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts, from the folder what it has and from the storage the rest; a failure
        is that part's value.
        """
        folder = folder_of(SourceInCache(str(self.folder / "v1"), self.content_id, self.max_bytes))
        if folder is None:
            return self.storage.read_many(parts)
        found: list[bytes | StorageError | None] = [
            folder.get(part) if part.etag else None for part in parts
        ]
        missing = [number for number, data in enumerate(found) if data is None]
        if missing:
            fetched = self.storage.read_many([parts[number] for number in missing])
            for number, data in zip(missing, fetched, strict=True):
                found[number] = data
            arrived = [
                (parts[number], data)
                for number, data in zip(missing, fetched, strict=True)
                if isinstance(data, bytes)
            ]
            folder.put((part, data) for part, data in arrived if part.etag)
        return cast("Contents", found)

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name begins with `prefix`, as the storage says now."""
        return self.storage.list_objects(prefix)


def content_id(storage: ReadsMany) -> str:
    """Name what a storage reads from: the same for all descriptions of one place, and never the
    same for two; holds no secret.
    """
    named = getattr(storage, "content_id", None)
    if named is not None:
        return str(named)
    where = str(getattr(storage, "uri", repr(storage)))
    endpoint = getattr(storage, "endpoint_url", None)
    if where.startswith("s3://") and endpoint is None:
        # Where a description leaves it out, AWS's own settings say which store it is.
        profile = getattr(storage, "profile", None) or os.environ.get("AWS_PROFILE", "")
        endpoint = (
            os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or f"AWS {profile}"
        )
    return f"{where} at {endpoint}" if endpoint else where
