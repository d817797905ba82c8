"""Owns a storage below a folder of a file system, local or shared: each object is a file that
appears whole.

Owns what a person is told when a file system refuses.
"""

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

from prefect_torch_ddp.errors import (
    BadKeyError,
    InvalidParamsError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.directory_objects import is_local, list_files, read_part
from prefect_torch_ddp.storage.keys import RESERVED_PART, check_key, check_prefix, is_key
from prefect_torch_ddp.storage.probe import probe
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, StoredObject

T = TypeVar("T")

STALE_AFTER_S = 24 * 3600.0
NUM_PLACINGS = 100
PART_BYTES = 4 * 2**20
_NO_OBJECT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


def absolute_folder(folder: str | Path) -> Path:
    """Return a folder's absolute path, `~` expanded, without looking at it.

    Raises:
        InvalidParamsError: there is no such home folder.
    """
    try:
        return Path(os.path.normpath(Path(folder).expanduser().absolute()))
    except RuntimeError as error:
        msg = f"{folder} names a home folder that can't be found; write the whole path"
        raise InvalidParamsError(msg) from error


@dataclass(frozen=True)
class DirectoryStorage:
    """A storage in a folder, made when it is first written to.

    Links are followed inside the root only, and never listed.
    """

    root: Path
    """Absolute; `~` is expanded when it is made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", absolute_folder(self.root))

    @property
    def uri(self) -> str:
        """The absolute path."""
        return str(self.root)

    def read(self, key: str) -> bytes:
        """Return the whole object; raise `ObjectNotFoundError` where there is none."""
        with self._opened(key) as file:
            return file.readall()

    def read_seen(self, key: str, see: Callable[[memoryview], object]) -> memoryview:
        """Return the whole object as `read` does, and call `see` with each part, in order,
        while the disk reads the next.
        """
        with self._opened(key) as file:
            return _read_seen(file, see)

    def open_file(self, key: str) -> BinaryIO | None:
        """Open the object to map it; None on a file system of another machine, which may take
        it away under the mapping.
        """
        with self._opened(key) as file:
            return (
                os.fdopen(os.dup(file.fileno()), "rb", buffering=0)
                if is_local(self._path(key).parent)
                else None
            )

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Write the whole object, replacing what was there; readers see the old or the new,
        never a part.
        """
        path = self._path(key)
        with explained("write", path), self._finished_file(data) as temporary:
            self._place(temporary, path, os.replace)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Write the object unless one exists; return whether this call wrote it.

        Exactly one of several racing callers wins.
        """
        path = self._path(key)
        with explained("write", path), self._finished_file(data) as temporary:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return self._place(temporary, path, _link)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose key begins with `prefix` (a string prefix), in key order;
        half-written ones never show.
        """
        check_prefix(prefix)
        return self._walk("", prefix)

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts, one after the other; a failure is that part's value, whose name may
        be any.
        """
        return [read_part(self.root, part) for part in parts]

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every file whose name begins with `prefix` (a string prefix), sorted by name;
        links are followed.
        """
        return list_files(self.root, prefix)

    def delete(self, key: str) -> None:
        """Delete the object, and the folders that it leaves empty; deleting an absent one is no
        error.
        """
        path = self._path(key)
        with explained("delete", path):
            try:
                path.unlink()
            except _NO_OBJECT:
                return
        for folder in path.parents:
            if folder == self.root:
                return
            try:
                folder.rmdir()
            except OSError:  # not empty
                return

    def check_writable(self) -> None:
        """Write, conditionally write, read and delete a small probe; `StorageError` says what
        is wrong.
        """
        probe(self)
        self._sweep()

    def _path(self, key: str) -> Path:
        path = self.root / check_key(key)
        self._keep_inside(path.parent, key)
        return path

    @contextmanager
    def _opened(self, key: str) -> Iterator[FileIO]:
        path = self._path(key)
        self._keep_inside(path, key)
        with explained("read", path):
            try:
                with path.open("rb", buffering=0) as file:
                    yield file
            except _NO_OBJECT as error:
                msg = f"there is no {key} in {self.uri}"
                raise ObjectNotFoundError(msg) from error

    def _keep_inside(self, path: Path, key: str) -> None:
        real, root = os.path.realpath(path), os.path.realpath(self.root)
        if os.path.commonpath([real, root]) != root:
            msg = f"{key} leads out of {self.uri} by a symbolic link, to {real}; remove the link, or move the root"
            raise BadKeyError(msg)

    @contextmanager
    def _finished_file(self, data: bytes | memoryview) -> Iterator[Path]:
        """Give a file that holds the data on disk, and remove it where it wasn't moved."""
        folder = self.root / RESERVED_PART
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / uuid.uuid4().hex
        try:
            with temporary.open("xb") as file:  # not tempfile's: those can't be read by other users
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _place(self, temporary: Path, path: Path, place: Callable[[Path, Path], T]) -> T:
        """Put the file at its place, again where a delete of its neighbour took the empty
        folder away under it.
        """
        for remaining in reversed(range(NUM_PLACINGS)):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                placed = place(temporary, path)
            except (
                FileNotFoundError,
                FileExistsError,
            ):  # the latter is mkdir's, when the folder goes while it looks
                if not remaining:
                    raise
            else:
                _sync_folder(path.parent)
                return placed
        raise AssertionError

    def _walk(self, folder_key: str, prefix: str) -> Iterator[StoredObject]:
        for name in self._sorted_names(folder_key):
            key = folder_key + name
            if key.endswith("/"):
                is_ours = key != f"{RESERVED_PART}/"
                if is_ours and (key.startswith(prefix) or prefix.startswith(key)):
                    yield from self._walk(key, prefix)
            elif key.startswith(prefix) and is_key(key):
                try:
                    num_bytes = (self.root / key).lstat().st_size
                except FileNotFoundError:  # deleted meanwhile
                    continue
                yield StoredObject(key=key, num_bytes=num_bytes)

    def _sorted_names(self, folder_key: str) -> tuple[str, ...]:
        """Name the files and folders, these with a slash: sorted like that, a walk gives the
        keys in order.
        """
        path = self.root / folder_key
        names = []
        with explained("list", path), suppress(*_NO_OBJECT), os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    names.append(f"{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    names.append(entry.name)
        return tuple(sorted(names))

    def _sweep(self) -> None:
        """Remove what killed processes left unfinished, a day later: nobody writes that
        long.
        """
        for path in (self.root / RESERVED_PART).glob("*"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - STALE_AFTER_S:
                    path.unlink()


def _read_seen(file: FileIO, see: Callable[[memoryview], object]) -> memoryview:
    num_bytes = os.fstat(file.fileno()).st_size
    content = memoryview(bytearray(num_bytes))
    with suppress(OSError):  # advice that not every file system takes
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    arrived = 0
    while num_read := file.readinto(content[arrived : arrived + PART_BYTES]):
        see(content[arrived : arrived + num_read])
        arrived += num_read
    return content[:arrived]


def _link(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS may say so of our own link, when its first answer was lost: link(2). Then the file
        # has two names.
        return temporary.stat().st_nlink > 1
    return True


def _sync_folder(folder: Path) -> None:
    """Have the new name survive a power cut."""
    with suppress(FileNotFoundError):  # deleted meanwhile, with the object
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_WAYS_OUT = {
    errno.EACCES: "give this user the right to do so, or choose another storage",
    errno.EPERM: "give this user the right to do so, or choose another storage",
    errno.EROFS: "choose a storage that isn't mounted read-only",
    errno.ENOSPC: "the disk is full: free space there, or choose another storage",
    errno.EDQUOT: "the quota is used up: free space there, or choose another storage",
    errno.EFBIG: "the file is larger than the file system or the process's limit (ulimit -f) allows",
    errno.ENOTDIR: "a file stands where a folder is needed: rename it, or choose another storage",
    errno.EEXIST: "a file stands where a folder is needed: rename it, or choose another storage",
    errno.EISDIR: "a folder stands where the file is needed: one name can't be a key and the beginning of other keys too",
    errno.EXDEV: "another file system is mounted below the storage's root: make that one the storage",
    errno.EOPNOTSUPP: "this file system has no hard links, by which of several writers one wins: choose another one",
    errno.ENAMETOOLONG: "choose a storage with a shorter path",
}


@contextmanager
def explained(verb: str, path: Path) -> Iterator[None]:
    """Turn what the file system says into a `StorageError` that says what was to be done,
    where, and what helps.
    """
    try:
        yield
    except OSError as error:
        _refuse(verb, path, error)


def _refuse(verb: str, path: Path, error: OSError) -> NoReturn:
    way_out = _WAYS_OUT.get(error.errno or 0, "check the disk, or the mount")
    msg = f"can't {verb} {path}: {error.strerror or error}; {way_out}"
    raise StorageError(msg) from error
