"""A storage in a folder of a file system, local or shared: an object is a file."""

import errno
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO, TypeVar

from prefect_torch_ddp.errors import BadKeyError, InvalidParamsError, ObjectNotFoundError
from prefect_torch_ddp.storage.directory_files import (
    NO_OBJECT,
    explained,
    is_local,
    list_files,
    read_part,
    walk,
)
from prefect_torch_ddp.storage.keys import RESERVED_PART, check_key, check_prefix, is_key
from prefect_torch_ddp.storage.probe import probe
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, StoredObject

T = TypeVar("T")

STALE_AFTER_S = 24 * 3600.0
"""Nobody writes a file that long: what is older was left by a killed process."""
NUM_PLACINGS = 100
PART_BYTES = 4 * 2**20


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

    Links are followed inside the root only, and never listed; `read_many` and `list_objects`, by
    which datasets read, follow them all.
    """

    root: Path
    """Absolute; `~` is expanded when the storage is made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", absolute_folder(self.root))

    @property
    def uri(self) -> str:
        """The absolute path."""
        return str(self.root)

    def read(self, key: str) -> bytes:
        """See `Storage.read`."""
        with self._opened(key) as file:
            return file.readall()

    def read_seen(self, key: str, see: Callable[[memoryview], object]) -> memoryview:
        """See `ShowsContent.read_seen`; the disk reads the next part while `see` looks at one."""
        with self._opened(key) as file:
            content = memoryview(bytearray(os.fstat(file.fileno()).st_size))
            with suppress(OSError):  # advice that not every file system takes
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
            arrived = 0
            while num_read := file.readinto(content[arrived : arrived + PART_BYTES]):
                see(content[arrived : arrived + num_read])
                arrived += num_read
            return content[:arrived]

    def open_file(self, key: str) -> BinaryIO | None:
        """See `HasFiles.open_file`."""
        with self._opened(key) as file:
            if not is_local(self._path(key).parent):
                return None
            return os.fdopen(os.dup(file.fileno()), "rb", buffering=0)

    def write(self, key: str, data: bytes | memoryview) -> None:
        """See `Storage.write`."""
        path = self._path(key)
        with explained("write", path), self._finished_file(data) as temporary:
            _place(temporary, path, os.replace)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """See `Storage.write_if_absent`."""
        path = self._path(key)
        with explained("write", path), self._finished_file(data) as temporary:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return _place(temporary, path, _link)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """See `Storage.list`."""
        found = walk(self.root, check_prefix(prefix), follows_links=False)
        return (StoredObject(key, status.st_size) for key, status in found if is_key(key))

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """See `ReadsMany.read_many`; one after the other."""
        return [read_part(self.root, part) for part in parts]

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """See `ReadsMany.list_objects`; links are followed."""
        return list_files(self.root, prefix)

    def delete(self, key: str) -> None:
        """See `Storage.delete`; the folders that are left empty go too."""
        path = self._path(key)
        with explained("delete", path):
            try:
                path.unlink()
            except NO_OBJECT:
                return
        for folder in path.parents:
            if folder == self.root:
                return
            try:
                folder.rmdir()
            except OSError:  # not empty
                return

    def check_writable(self) -> None:
        """See `Storage.check_writable`; removes what killed processes left unfinished."""
        probe(self)
        for path in (self.root / RESERVED_PART).glob("*"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - STALE_AFTER_S:
                    path.unlink()

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
            except NO_OBJECT as error:
                msg = f"there is no {key} in {self.uri}"
                raise ObjectNotFoundError(msg) from error

    def _keep_inside(self, path: Path, key: str) -> None:
        real, root = os.path.realpath(path), os.path.realpath(self.root)
        if os.path.commonpath([real, root]) != root:
            msg = (
                f"{key} leads out of {self.uri} by a symbolic link, to {real}; "
                "remove the link, or move the root"
            )
            raise BadKeyError(msg)

    @contextmanager
    def _finished_file(self, data: bytes | memoryview) -> Iterator[Path]:
        """Give a file that holds the data on disk, and remove it where it wasn't moved."""
        folder = self.root / RESERVED_PART
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / uuid.uuid4().hex
        try:
            with temporary.open("xb") as file:  # tempfile's can't be read by other users
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def _place(temporary: Path, path: Path, place: Callable[[Path, Path], T]) -> T:
    """Move the file into place, again where a neighbour's delete took the empty folder away."""
    for remaining in reversed(range(NUM_PLACINGS)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            placed = place(temporary, path)
        except (FileNotFoundError, FileExistsError):  # mkdir raises both, as the folder goes
            if not remaining:
                raise
        else:
            _sync_folder(path.parent)
            return placed
    raise AssertionError


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
