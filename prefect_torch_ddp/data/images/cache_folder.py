"""Owns the files of the read-through cache: how an entry is written, believed, counted and
evicted, among many processes.
"""

import hashlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from prefect_torch_ddp.data.images.cache_room import LAST_USE_STEP_S, CacheRoom
from prefect_torch_ddp.storage.protocol import ObjectPart

logger = logging.getLogger(__name__)

DIGEST_BYTES = 32
STALE_AFTER_S = 3600.0
PAUSE_S = 60.0
"""How long nothing is written after a write failed."""
KEPT_FREE_BYTES = 4 * 2**30
KEPT_FREE_PART = 20
"""A twentieth of the disk, at most `KEPT_FREE_BYTES`, is left to others: checkpoints may lie on
it too."""


@dataclass(frozen=True, slots=True)
class SourceInCache:
    """What describes the entries of one source of objects: plain values."""

    root: str
    """The cache's folder, absolute."""
    source: str
    """Names bucket, endpoint and prefix; entries of two sources never mix."""
    max_bytes: int
    """Of the whole cache, over all sources and processes."""


class CacheFolder:
    """The entries of one source, as this process and those forked from it see them; safe among
    threads.

    An entry is a file: the object's bytes, then a SHA-256 over its name and them. The name is a
    digest of source, key, range, size and ETag. So what is damaged, cut or at a wrong place is
    never believed. A file appears whole, by a rename.
    """

    def __init__(self, described: SourceInCache) -> None:
        """Make the folders, and hold the source's lock, by which others see that it is in use.

        Raises:
            OSError: they can't be made, or are another user's.
        """
        self._source = described.source
        self._folder = os.path.join(
            described.root, hashlib.sha256(described.source.encode()).hexdigest()[:32]
        )
        os.makedirs(self._unfinished, mode=0o700, exist_ok=True)  # noqa: PTH103 - plain paths: a Path costs as much as a read
        for path in (described.root, self._folder):
            if os.stat(path).st_uid != os.geteuid():  # noqa: PTH116
                msg = f"{path} belongs to another user, who could put anything there"
                raise PermissionError(msg)
        self._room = CacheRoom(described.root, self._folder, described.max_bytes)
        self._sweep()
        self._no_writes_before = 0.0
        self._complaints = _Once()

    def get(self, part: ObjectPart) -> bytes | None:
        """Return a part's bytes, None where they aren't there; a damaged file is removed, with
        a warning.
        """
        self._room.hold()
        name = self._name(part)
        path = self._path(name)
        try:
            found = _read(path, part.num_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._complaints.say(
                f"can't read the cache {self._folder}: {error.strerror}; its objects are fetched each time"
            )
            return None
        data, digest, last_use = found
        if digest != _digest(name, data):
            logger.warning("%s of the cache is damaged: %s is fetched again", path, part.key)
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
            return None
        if time.time() - last_use > LAST_USE_STEP_S:
            with suppress(OSError):
                os.utime(path)
        return data

    def put(self, arrived: Iterable[tuple[ObjectPart, bytes]]) -> None:
        """Keep what there is room for.

        Never raises for want of it: a warning says once why nothing is kept.
        """
        new = [
            (self._path(name), name, data)
            for name, data in ((self._name(part), data) for part, data in arrived)
        ]
        # Another process may have been faster; and what can't fit must not push out everything
        # else.
        new = [
            entry
            for entry in new
            if len(entry[2]) + DIGEST_BYTES <= self._room.max_bytes
            and not os.path.lexists(entry[0])
        ]
        if not new or time.monotonic() < self._no_writes_before:
            return
        try:
            os.makedirs(self._unfinished, mode=0o700, exist_ok=True)  # noqa: PTH103 - somebody may have removed the whole cache
            self._refuse_full_disk(sum(len(data) for _, _, data in new))
            with self._room.taken([len(data) + DIGEST_BYTES for _, _, data in new]) as granted:
                for path, name, data in new[:granted]:
                    self._write(path, name, data)
        except OSError as error:
            self._no_writes_before = time.monotonic() + PAUSE_S
            self._complaints.say(
                f"can't write to the cache {self._folder}: {error.strerror or error}; reading goes on without it"
            )
        else:
            if self._room.is_full:
                self._complaints.say(
                    f"the cache {self._room.root} is full ({self._room.max_bytes} bytes), and all of it is in use: what doesn't "
                    "fit is fetched each time; give it a larger max_bytes"
                )

    @property
    def _unfinished(self) -> str:
        return f"{self._folder}/unfinished"

    def _name(self, part: ObjectPart) -> str:
        described = (self._source, part.key, part.start, part.num_bytes, part.etag)
        return hashlib.sha256(repr(described).encode("utf-8", "surrogatepass")).hexdigest()[:40]

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name[:2]}/{name}"

    def _write(self, path: str, name: str, data: bytes) -> None:
        unfinished = f"{self._unfinished}/{uuid.uuid4().hex}"
        try:
            with open(unfinished, "xb", buffering=0, opener=_private) as file:
                for piece in (data, _digest(name, data)):
                    view = memoryview(piece)
                    while view:
                        view = view[file.write(view) or 0 :]
            try:
                os.replace(unfinished, path)  # noqa: PTH105
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120
                os.replace(unfinished, path)  # noqa: PTH105
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished)  # noqa: PTH108
            raise

    def _refuse_full_disk(self, num_bytes: int) -> None:
        disk = os.statvfs(self._folder)
        kept_free = min(KEPT_FREE_BYTES, disk.f_blocks * disk.f_frsize // KEPT_FREE_PART)
        if disk.f_bavail * disk.f_frsize - num_bytes < kept_free:
            msg = "the disk is nearly full"
            raise OSError(msg)

    def _sweep(self) -> None:
        """Remove what killed processes left unfinished."""
        with os.scandir(self._unfinished) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < time.time() - STALE_AFTER_S:
                        os.unlink(entry.path)  # noqa: PTH108


class _Once:
    """Says each thing once in a process."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning(text)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _read(path: str, num_bytes: int) -> tuple[bytes, bytes, float]:
    """Return content, what stands behind it, and when it was last used."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if status.st_size != num_bytes + DIGEST_BYTES:
            return b"", b"", status.st_mtime
        data = os.read(file, num_bytes)
        while len(data) < num_bytes and (
            more := os.read(file, num_bytes - len(data))
        ):  # Linux reads 2 GiB at most at once
            data += more
        return data, os.read(file, DIGEST_BYTES), status.st_mtime
    finally:
        os.close(file)


def _digest(name: str, data: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(data)
    return digest.digest()


_folders: dict[SourceInCache, CacheFolder | None] = {}
_lock = threading.Lock()


def folder_of(described: SourceInCache) -> CacheFolder | None:
    """Return this process's folder of a source; None, and a warning once, where it can't be
    used.
    """
    folder = _folders.get(described)
    if folder is not None or described in _folders:
        return folder
    with _lock:
        if described not in _folders:
            try:
                _folders[described] = CacheFolder(described)
            except OSError as error:
                reason = error.strerror or error
                logger.warning(
                    "can't use the cache %s: %s; everything is fetched each time",
                    described.root,
                    reason,
                )
                _folders[described] = None
        return _folders[described]


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603 - a fork may happen while another thread holds it, and the child would wait for ever
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
