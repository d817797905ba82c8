"""The read-through cache: objects of a remote storage, kept on local disk and checked there."""

import fcntl
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from glob import escape, iglob
from pathlib import Path
from typing import Any

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.storage.locate import as_readable
from prefect_torch_ddp.storage.names import absolute_folder
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, Readable

logger = logging.getLogger(__name__)

MAX_BYTES = 50 * 2**30
DIGEST_BYTES = 32
TOUCH_AFTER_S = 3600.0
"""A file's time is its last use, to the hour: touching it at each read would cost."""
UNUSED_AFTER_S = 24 * 3600.0
PAUSE_S = 60.0
"""After a failed write, or a scan that found nothing to evict, before the next try."""
KEPT_FREE_BYTES, KEPT_FREE_PART = 4 * 2**30, 20
"""At most 4 GiB, or a twentieth of the disk: checkpoints may lie on it too."""
PATIENCE_S, POLL_S = 1.0, 0.002


@exported_by("prefect_torch_ddp.data")
@dataclass(frozen=True)
class CachedReads(Readable):
    """Reads objects of a storage through a cache in a folder on a local disk.

    Any number of this user's processes may share a folder, with the same storages or others.
    What is read from it was verified when it arrived (by its ETag if that is an MD5) and is
    verified again, by a SHA-256. A damaged file is fetched again, with a warning. Objects
    without an ETag aren't kept, since nobody could tell whether they changed. If the folder
    can't be used, or the disk is full, reading continues without it, with one warning a process.

    Example:
        Keep up to 50 GB of the images on a local disk:

            from pathlib import Path
            from prefect_torch_ddp.data import CachedReads, S3ImageFolder

            images = S3ImageFolder(CachedReads(ctx.source, Path("cache"), max_bytes=50 * 10**9))
    """

    storage: Readable
    """Where the objects are."""
    folder: Path
    """On a local disk; created if it doesn't exist, for this user only. `~` is expanded."""
    max_bytes: int = MAX_BYTES
    """Largest number of bytes in the folder, over the objects of all storages together. A twentieth
    of the disk, at most 4 GiB, is left free in any case."""

    def __post_init__(self) -> None:
        takes = "a storage, such as storage_from_uri('s3://bucket/raw')"
        as_readable(self.storage, "what a cache keeps", takes)
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

    @property
    def identity(self) -> str:
        """The storage's; see `Readable.identity`."""
        return self.storage.identity

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """The storage's; see `Readable.storage_options`. What opens `uri` doesn't use the cache."""
        return self.storage.storage_options

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts, from the folder if it has them; if one fails, its value is the error."""
        if not parts:
            return self.storage.read_many(parts)
        folder = folder_of(str(self.folder / "v1"), self.storage.identity, self.max_bytes)
        if folder is None:
            return self.storage.read_many(parts)
        contents: list[Any] = [folder.get(part) if part.etag else None for part in parts]
        missing = [number for number, data in enumerate(contents) if data is None]
        if missing:
            wanted = [parts[number] for number in missing]
            fetched = list(zip(wanted, self.storage.read_many(wanted), strict=True))
            folder.put([(p, data) for p, data in fetched if p.etag and isinstance(data, bytes)])
            for number, (_, data) in zip(missing, fetched, strict=True):
                contents[number] = data
        return contents

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name begins with `prefix`, as the storage says now."""
        return self.storage.list_objects(prefix)

    def list_level(self, prefix: str) -> Iterator[ListedObject | str]:
        """Yield what the storage's `list_level` yields now; listings aren't kept."""
        return self.storage.list_level(prefix)


class CacheFolder:
    """The entries of one storage in a cache that many processes share; safe among threads.

    An entry is a file: the object's bytes, then a SHA-256 over the entry's name and them. The
    name is a digest of storage, key, range, size and ETag. So a file that is damaged, cut or in
    another's place is never believed.

    The file `count` has the bytes of all entries, and its lock is held while entries are
    written. When it says that the cache is full, the folder is scanned, and what belongs to
    storages that no process has open, or was unused for a day, is evicted, longest unused
    first. Entries in use stay: with a new order each epoch, replacing them would miss more and
    write all the time (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training",
    VLDB 2021).
    """

    def __init__(self, root: str, where: str, max_bytes: int) -> None:
        """Make the folder, and hold its lock: its entries are in use."""
        self.root = root
        self.max_bytes = max_bytes
        self._where = where
        self._folder = f"{root}/{hashlib.sha256(where.encode()).hexdigest()[:32]}"
        self._no_writes_before = 0.0
        # An entry is read by one call, and Linux reads 2 GiB at most.
        self._max_entry_bytes = min(max_bytes - DIGEST_BYTES, 2**30)
        # Plain paths: a Path costs as much as a read.
        os.makedirs(self._folder, mode=0o700, exist_ok=True)  # noqa: PTH103
        for path in (root, self._folder):
            if os.stat(path).st_uid != os.geteuid():  # noqa: PTH116
                msg = f"{path} belongs to another user, who could put anything there"
                raise PermissionError(msg)
        # Never closed: forks inherit the lock, and it ends with the last of them.
        _lock(_open_or_make(f"{self._folder}/in_use.lock", os.O_RDWR), fcntl.LOCK_SH, PATIENCE_S)

    def get(self, part: ObjectPart) -> bytes | None:
        """Return a part's bytes, None if it has none; a damaged file is removed."""
        name = self._name(part)
        path = self._path(name)
        try:
            with open(path, "rb", buffering=0, opener=_open) as file:
                whole = file.read(part.num_bytes + DIGEST_BYTES + 1)  # another byte shows
                last_use = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn_once(
                f"can't read the cache {self._folder}: {error.strerror}; "
                "its objects are fetched each time"
            )
            return None
        data = whole[: part.num_bytes]
        if whole[part.num_bytes :] != hashlib.sha256(name.encode() + data).digest():
            logger.warning("%s of the cache is damaged: %s is fetched again", path, part.key)
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
            return None
        if time.time() - last_use > TOUCH_AFTER_S:
            with suppress(OSError):
                os.utime(path)
        return data

    def put(self, arrived: Sequence[tuple[ObjectPart, bytes]]) -> None:
        """Keep what there is room for; if nothing can be written, warn once."""
        # Another process may have been faster; what can't fit must not push out all the rest.
        new = [
            (name, data)
            for name, data in ((self._name(part), data) for part, data in arrived)
            if len(data) <= self._max_entry_bytes and not os.path.lexists(self._path(name))
        ]
        if not new or time.monotonic() < self._no_writes_before:
            return
        try:
            # Somebody may have removed it.
            os.makedirs(self._folder, mode=0o700, exist_ok=True)  # noqa: PTH103
            self._refuse_full_disk(sum(len(data) for _, data in new))
            with open(f"{self.root}/count", "r+b", buffering=0, opener=_open_or_make) as count:
                # Held by a stopped process, or one that makes room: then nothing is kept.
                if _lock(count.fileno(), fcntl.LOCK_EX, PATIENCE_S):
                    for name, data in new:
                        if not self._has_room(len(data) + DIGEST_BYTES, count.fileno()):
                            break
                        self._write(name, data)
        except OSError as error:
            self._no_writes_before = time.monotonic() + PAUSE_S
            _warn_once(
                f"can't write to the cache {self._folder}: {error.strerror or error}; "
                "reading continues without it"
            )

    def _name(self, part: ObjectPart) -> str:
        described = (self._where, part.key, part.start, part.num_bytes, part.etag)
        return hashlib.sha256(repr(described).encode("utf-8", "surrogatepass")).hexdigest()[:40]

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name[:2]}/{name}"

    def _write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        unfinished = f"{path}.{uuid.uuid4().hex}"
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
        try:
            with open(unfinished, "xb", opener=_open) as file:
                file.write(data)
                file.write(hashlib.sha256(name.encode() + data).digest())
            os.replace(unfinished, path)  # noqa: PTH105
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)  # noqa: PTH108
            raise

    def _refuse_full_disk(self, num_bytes: int) -> None:
        if num_bytes > room_on_disk(self._folder):
            msg = "the disk is nearly full"
            raise OSError(msg)

    def _has_room(self, size: int, count: int) -> bool:
        """Tell whether an entry may be written, and count it.

        Counted before it is written: a killed process leaves the count too high, until the next
        scan.
        """
        noted = os.pread(count, 64, 0).split()
        is_sound = [word.isdigit() for word in noted] == [True, True]
        used, scan_at = map(int, noted) if is_sound else (self.max_bytes, 0)  # as if full
        if used + size > self.max_bytes and time.time() >= scan_at:
            used = self._evict(size)
            scan_at = int(time.time() + PAUSE_S) if used + size > self.max_bytes else 0
        has_room = used + size <= self.max_bytes
        os.pwrite(count, b"%020d %020d" % (used + size * has_room, scan_at), 0)
        if not has_room:
            _warn_once(
                f"the cache {self.root} is full ({self.max_bytes} bytes), and all of it is in "
                "use: what doesn't fit is fetched each time; give it a larger max_bytes"
            )
        return has_room

    def _evict(self, wanted: int) -> int:
        """Make room for so many bytes, at least a tenth; return the bytes that are left."""
        used, evictable = 0, []
        for folder in iglob(f"{escape(self.root)}/*/"):  # noqa: PTH207
            with open(f"{folder}in_use.lock", "r+b", opener=_open_or_make) as lock:
                is_unused = _lock(lock.fileno(), fcntl.LOCK_EX)
            for path in iglob(f"{escape(folder)}??/*"):  # noqa: PTH207
                with suppress(FileNotFoundError):  # removed meanwhile
                    status = os.lstat(path)
                    used += status.st_size
                    if is_unused or time.time() - status.st_mtime > UNUSED_AFTER_S:
                        evictable.append((status.st_mtime, status.st_size, path))
        target = self.max_bytes - max(wanted, self.max_bytes // 10)
        for _, size, path in sorted(evictable):
            if used <= target:
                break
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
                used -= size
        return used


def room_on_disk(folder: str) -> int:
    """Return the bytes that a cache may still write to the disk of a folder; 0 if there are none.

    Some are left free, since checkpoints may lie on it too.
    """
    disk = os.statvfs(folder)
    kept_free = min(KEPT_FREE_BYTES, disk.f_blocks * disk.f_frsize // KEPT_FREE_PART)
    return max(0, disk.f_bavail * disk.f_frsize - kept_free)


@cache
def folder_of(root: str, where: str, max_bytes: int) -> CacheFolder | None:
    """Return this process's folder of a storage; None if it can't be used."""
    try:
        return CacheFolder(root, where, max_bytes)
    except OSError as error:
        reason = error.strerror or error
        _warn_once(f"can't use the cache {root}: {reason}; everything is fetched each time")
        return None


@cache
def _warn_once(text: str) -> None:
    logger.warning(text)


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _open_or_make(path: str, flags: int) -> int:
    return _open(path, flags | os.O_CREAT)


def _lock(file: int, kind: int, patience_s: float = 0.0) -> bool:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True
