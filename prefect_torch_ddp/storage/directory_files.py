"""Files in a folder: listing, reading for datasets, and the errors of file systems in words."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect_torch_ddp.errors import (
    BadKeyError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.keys import RESERVED_PART
from prefect_torch_ddp.storage.protocol import ListedObject, ObjectPart

NO_OBJECT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_CHANGED = (
    "the file changed since it was listed: list it again, by running prepare again, "
    "or keep data in use unchanged"
)
_RIGHTS = "give this user the right to do so, or choose another storage"
_FILE_IN_THE_WAY = "a file stands where a folder is needed: rename it, or choose another storage"
_WAYS_OUT = {
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
    errno.EXDEV: "another file system is mounted below the storage's root: make that one the "
    "storage",
    errno.EOPNOTSUPP: "this file system has no hard links, by which of several writers one "
    "wins: choose another one",
    errno.ENAMETOOLONG: "choose a storage with a shorter path",
}


@contextmanager
def explained(verb: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a `StorageError` with what was to be done, where, and what helps."""
    try:
        yield
    except OSError as error:
        way_out = _WAYS_OUT.get(error.errno or 0, "check the disk, or the mount")
        msg = f"can't {verb} {path}: {error.strerror or error}; {way_out}"
        raise StorageError(msg) from error


def read_part(root: Path, part: ObjectPart) -> bytes | StorageError:
    """Read a file, or a range of it; a failure is returned."""
    path = root / part.key
    if part.key.startswith("/") or ".." in part.key.split("/"):
        return BadKeyError(f"{part.key!r} leads out of {root}")
    try:
        with explained("read", path):
            return _read(path, part)
    except StorageError as error:
        if isinstance(error.__cause__, NO_OBJECT):
            return ObjectNotFoundError(f"there is no {part.key} in {root}")
        return error


def _read(path: Path, part: ObjectPart) -> bytes:
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if part.etag is not None and part.etag != _etag(found):
            msg = f"can't read {path}: {_CHANGED}"
            raise ObjectChangedError(msg)
        file.seek(part.start or 0)
        content = file.read(part.num_bytes if part.start is not None else -1)
    if len(content) != part.num_bytes:
        msg = f"can't read {path}: it has {found.st_size} bytes; {_CHANGED}"
        raise ObjectChangedError(msg)
    return content


def list_files(root: Path, prefix: str) -> Iterator[ListedObject]:
    """Yield the files whose key begins with the prefix, sorted as S3 does; links are followed."""
    for key, found in walk(root, prefix, follows_links=True):
        yield ListedObject(key, found.st_size, _etag(found))


def walk(
    root: Path,
    prefix: str,
    folder_key: str = "",
    above: frozenset[tuple[int, int]] = frozenset(),
    *,
    follows_links: bool,
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files whose key begins with the prefix, sorted by key as S3 does.

    Args:
        root: the folder that keys are relative to.
        prefix: a string prefix.
        folder_key: where to begin, empty or with a slash at its end.
        above: the folders on the way to it: a link to one of them isn't followed forever.
        follows_links: whether links are followed, or left out.
    """
    for name in _sorted_names(root / folder_key, follows_links=follows_links):
        key, is_folder = folder_key + name, name.endswith("/")
        may_match = key.startswith(prefix) or (is_folder and prefix.startswith(key))
        if not may_match or key == f"{RESERVED_PART}/":
            continue
        try:
            found = (root / key).stat(follow_symlinks=follows_links)
        except FileNotFoundError:  # deleted meanwhile, or a link to nothing
            continue
        folder = found.st_dev, found.st_ino
        if not is_folder:
            yield key, found
        elif folder not in above:
            yield from walk(root, prefix, key, above | {folder}, follows_links=follows_links)


def _sorted_names(folder: Path, *, follows_links: bool) -> list[str]:
    """Return the names, those of folders with a slash: so sorted, a walk gives keys in order."""
    names = []
    with explained("list", folder), suppress(*NO_OBJECT), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=follows_links):
                names.append(f"{entry.name}/")
            elif follows_links or entry.is_file(follow_symlinks=False):
                names.append(entry.name)
    return sorted(names, key=os.fsencode)


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns:x}-{found.st_size:x}"


_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""A file that is open or mapped there stays readable after its name is gone."""


def is_local(folder: Path) -> bool:
    """Return whether a folder is known to be on a file system of this machine (on Linux only).

    A file that is mapped into memory from elsewhere ends the process by SIGBUS where its server
    fails.
    """
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    # proc(5): mount id, parent id, device, root, mount point, options, tags, "-", file system, ...
    kinds = {
        rest.split()[0]
        for mount, _, rest in (line.partition(" - ") for line in lines)
        if mount.split()[2] == name
    }
    return bool(kinds) and kinds <= _LOCAL
