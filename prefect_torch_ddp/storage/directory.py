"""A storage in a folder of a file system, local or shared: an object is a file."""

import errno
import fcntl
import mmap
import os
import pwd
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

from prefect_torch_ddp.errors import (
    BadKeyError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.storage.names import (
    RESERVED_FOLDER,
    absolute_folder,
    check_key,
    check_prefix,
    is_key,
)
from prefect_torch_ddp.storage.protocol import (
    CHANGED,
    Contents,
    ListedObject,
    ObjectPart,
    Storage,
    StoredObject,
)

T = TypeVar("T")

STALE_AFTER_S = 24 * 3600.0
OF_TEMPORARY = re.compile("[0-9a-f]{32}")
"""The names of unfinished files."""
"""Nobody writes a file that long: what is older was left by a killed process."""
UNCACHED_BYTES = 2**24
"""From here on an object in memory that begins a page is written past the kernel's page cache: to
find pages there for 200 MB takes 60 to 350 ms of a processor, which a training would miss."""
NO_OBJECT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_RIGHTS = "give this user the right to do so, or choose another storage"
NO_RIGHTS = (errno.EACCES, errno.EPERM)
_FILE_IN_THE_WAY = "a file stands where a folder is needed: rename it, or choose another storage"
WAYS_OUT = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "choose a storage that isn't mounted read-only",
    errno.ENOSPC: "the disk is full: free space there, or choose another storage",
    errno.EDQUOT: "the quota is used up: free space there, or choose another storage",
    errno.EFBIG: "the file is larger than the file system or the process's limit (ulimit -f) "
    "allows",
    errno.ENOTDIR: _FILE_IN_THE_WAY,
    errno.EEXIST: _FILE_IN_THE_WAY,
    errno.EISDIR: "a folder stands where the file is needed: one name can't be a key and the "
    "beginning of other keys too",
    errno.EOPNOTSUPP: "this file system has no hard links, by which of several writers one "
    "wins: choose another one",
}


@exported_by("prefect_torch_ddp")
@dataclass(frozen=True)
class DirectoryStorage(Storage):
    """A storage in a folder, which is created by the first write.

    Links are followed only within the root, and never listed. `read_many` and `list_objects`, with
    which datasets are read, follow all links.

    Example:
        The runs in a folder:

            from pathlib import Path
            from prefect_torch_ddp import DirectoryStorage

            storage = DirectoryStorage(Path("runs"))
            print({found.key.split("/")[1] for found in storage.list("runs/")})
    """

    root: Path
    """Absolute; `~` is expanded when the storage is made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", absolute_folder(self.root))

    @property
    def uri(self) -> str:
        """The absolute path."""
        return str(self.root)

    @property
    def local_folder(self) -> Path:
        """The root."""
        return self.root

    def below(self, folder: str) -> Self:
        """See `Storage.below`."""
        return replace(self, root=self.root / check_key(folder))

    def read(self, key: str) -> bytes:
        """See `Storage.read`."""
        with self.open_file(key) as file, _explained("read", self._path(key)):
            return file.read()

    def open_file(self, key: str) -> BinaryIO:
        """See `Storage.open_file`."""
        path = self._path(key)
        self._keep_inside(path, key)
        with _explained("read", path):
            return path.open("rb", buffering=0)

    def write(self, key: str, data: bytes | memoryview) -> None:
        """See `Storage.write`."""
        path = self._path(key)
        with _explained("write", path), self._finished_file(data) as temporary:
            _move(temporary, path, os.replace)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """See `Storage.write_if_absent`."""
        path = self._path(key)
        with _explained("write", path), self._finished_file(data) as temporary:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return _move(temporary, path, _link)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """See `Storage.list`."""
        found = _walk(self.root, check_prefix(prefix), follows_links=False)
        return (StoredObject(key, status.st_size) for key, status in found if is_key(key))

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """See `Readable.read_many`; one after the other."""
        return [self._part_or_error(part) for part in parts]

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """See `Readable.list_objects`; links are followed."""
        found = _walk(self.root, prefix, follows_links=True)
        return (ListedObject(key, status.st_size, _etag(status)) for key, status in found)

    def delete(self, key: str) -> None:
        """See `Storage.delete`; the folders that are left empty go too."""
        path = self._path(key)
        with _explained("delete", path), suppress(*NO_OBJECT):
            path.unlink()
            with suppress(OSError):  # one isn't empty
                for folder in path.relative_to(self.root).parents[:-1]:
                    (self.root / folder).rmdir()

    def check_writable(self) -> None:
        """See `Storage.check_writable`; removes what killed processes left unfinished."""
        super().check_writable()
        for path in (self.root / RESERVED_FOLDER).glob("*"):
            if not OF_TEMPORARY.fullmatch(path.name):
                continue  # the folder may be a home, which has files of others there
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - STALE_AFTER_S:
                    path.unlink()

    def _path(self, key: str) -> Path:
        path = self.root / check_key(key)
        self._keep_inside(path.parent, key)
        return path

    def _part_or_error(self, part: ObjectPart) -> bytes | StorageError:
        if part.key.startswith("/") or ".." in part.key.split("/"):
            return BadKeyError(f"{part.key!r} leads out of {self.root}")
        try:
            return _read_part(self.root / part.key, part)
        except StorageError as error:
            return error

    def _keep_inside(self, path: Path, key: str) -> None:
        real, root = os.path.realpath(path), os.path.realpath(self.root)
        if os.path.commonpath([real, root]) != root:
            where = f"{key} leads out of {self.uri} by a symbolic link, to {real}"
            msg = f"{where}; remove the link, or move the root"
            raise BadKeyError(msg)

    @contextmanager
    def _finished_file(self, data: bytes | memoryview) -> Iterator[Path]:
        """Give a file that holds the data on disk, and remove it if it wasn't moved."""
        folder = self.root / RESERVED_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / uuid.uuid4().hex
        try:
            with temporary.open("xb") as file:  # tempfile's can't be read by other users
                view = memoryview(data).cast("B")
                if len(view) >= UNCACHED_BYTES:
                    file.seek(_write_uncached(file.fileno(), view))
                file.write(view[file.tell() :])
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


def _write_uncached(descriptor: int, data: memoryview) -> int:
    """Write whole pages by direct I/O, if it is to be had; return how many bytes those are."""
    flags, num_written = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0
    with suppress(OSError):  # what lasts, such as a full disk, meets who writes the rest too
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        while num_written < (end := len(data) - len(data) % mmap.PAGESIZE):
            num_written += os.write(descriptor, data[num_written:end])
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return num_written


def _move(temporary: Path, path: Path, move: Callable[[Path, Path], T]) -> T:
    """Move the file into place, again where a neighbour's delete took the empty folder away."""
    for remaining in reversed(range(100)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            moved = move(temporary, path)
        except (FileNotFoundError, FileExistsError):  # mkdir raises both, as the folder goes
            if not remaining:
                raise
        else:
            _sync_folder(path.parent)
            return moved
    raise AssertionError


def _link(temporary: Path, path: Path) -> bool:
    with suppress(FileExistsError):  # NFS may say so of our own, if its first answer was lost
        os.link(temporary, path)
    return temporary.stat().st_nlink > 1


def _sync_folder(folder: Path) -> None:
    """Have the new name survive a power cut."""
    with suppress(FileNotFoundError):  # deleted meanwhile, with the object
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _explained(verb: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a `StorageError` with what was to be done, where, and what helps."""
    try:
        yield
    except OSError as error:
        if verb == "read" and isinstance(error, NO_OBJECT):
            msg = f"there is no {path}"
            raise ObjectNotFoundError(msg) from error
        way_out = WAYS_OUT.get(error.errno or 0, "check the disk, or the mount")
        if error.errno in NO_RIGHTS:
            # Not always the path: what is written is first a file in another folder.
            refused = error.filename2 or error.filename or path
            way_out += f"; {_whose(Path(os.fsdecode(refused)))}"
        msg = f"can't {verb} {path}: {error.strerror or error}; {way_out}"
        raise StorageError(msg) from error


def _whose(path: Path) -> str:
    """Say to whom a path belongs, or the nearest folder above it that is there, and who asks."""
    for each in (path, *path.parents):
        with suppress(OSError):
            found = each.lstat()
            rights = f"{stat.filemode(found.st_mode)}, user {_user(found.st_uid)}"
            return f"{each} has {rights}, and this process is user {_user(os.geteuid())}"
    return f"this process is user {_user(os.geteuid())}"


def _user(number: int) -> str:
    """Return a user's name, or the number if this machine doesn't know the user."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _read_part(path: Path, part: ObjectPart) -> bytes:
    with _explained("read", path), path.open("rb") as file:
        found = os.fstat(file.fileno())
        if part.etag is not None and part.etag != _etag(found):
            msg = f"can't read {path}: the file {CHANGED}"
            raise ObjectChangedError(msg)
        file.seek(part.start or 0)
        content = file.read(part.num_bytes if part.start is not None else -1)
    if len(content) != part.num_bytes:
        msg = f"can't read {path}: it has {found.st_size} bytes; the file {CHANGED}"
        raise ObjectChangedError(msg)
    return content


def _walk(
    root: Path,
    prefix: str,
    folder_key: str = "",
    above: frozenset[tuple[int, int]] = frozenset(),
    *,
    follows_links: bool,
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files whose key begins with the prefix, sorted by key as S3 does."""
    for name in _sorted_names(root / folder_key, follows_links=follows_links):
        key, is_folder = folder_key + name, name.endswith("/")
        may_match = key.startswith(prefix) or (is_folder and prefix.startswith(key))
        if not may_match or key == f"{RESERVED_FOLDER}/":
            continue
        try:
            found = (root / key).stat(follow_symlinks=follows_links)
        except FileNotFoundError:  # deleted meanwhile, or a link to nothing
            continue
        here = found.st_dev, found.st_ino
        if not is_folder:
            yield key, found
        elif here not in above:  # a link to a folder above isn't followed forever
            yield from _walk(root, prefix, key, above | {here}, follows_links=follows_links)


def _sorted_names(folder: Path, *, follows_links: bool) -> list[str]:
    """Return the names, those of folders with a slash: so sorted, a walk gives keys in order."""
    names = []
    with _explained("list", folder), suppress(*NO_OBJECT), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=follows_links):
                names.append(f"{entry.name}/")
            elif follows_links or entry.is_file(follow_symlinks=False):
                names.append(entry.name)
    return sorted(names, key=os.fsencode)


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns:x}-{found.st_size:x}"
