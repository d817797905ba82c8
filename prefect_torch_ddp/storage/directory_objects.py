"""Owns reading a folder's files as a dataset does: whole or in part, whatever their names,
links followed.

Owns the question whether a file may be mapped into memory: a mapping whose server fails ends
the process by SIGBUS.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prefect_torch_ddp.errors import (
    BadKeyError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.keys import RESERVED_PART
from prefect_torch_ddp.storage.protocol import ListedObject, ObjectPart

_CHANGED = "the file changed since it was listed: list it again, by running prepare again, or keep data in use unchanged"


def read_part(root: Path, part: ObjectPart) -> bytes | StorageError:
    """Read a file, or a range of it; a failure is returned."""
    path = root / part.key
    if part.key.startswith("/") or ".." in part.key.split("/"):
        return BadKeyError(f"{part.key!r} leads out of {root}")
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if part.etag is not None and part.etag != _etag(found):
                return ObjectChangedError(f"can't read {path}: {_CHANGED}")
            file.seek(part.start or 0)
            content = file.read(part.num_bytes if part.start is not None else -1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return ObjectNotFoundError(f"there is no {part.key} in {root}")
    except OSError as error:
        return StorageError(
            f"can't read {path}: {error.strerror or error}; check the disk, or the mount"
        )
    if len(content) != part.num_bytes:
        return ObjectChangedError(f"can't read {path}: it has {found.st_size} bytes; {_CHANGED}")
    return content


def list_files(root: Path, prefix: str) -> Iterator[ListedObject]:
    """Yield the files below a folder whose key begins with the prefix, sorted as S3 sorts keys;
    links are followed.
    """
    return _walk(root, "", prefix, frozenset())


def _walk(
    root: Path, folder_key: str, prefix: str, above: frozenset[tuple[int, int]]
) -> Iterator[ListedObject]:
    """Walk a folder; `above` are the folders on the way to it, so that a link to one of them
    isn't followed for ever.
    """
    for name, is_folder in _sorted_names(root / folder_key):
        key = folder_key + name
        if is_folder:
            found = (root / key).stat()
            place = found.st_dev, found.st_ino
            if (
                key != f"{RESERVED_PART}/"
                and place not in above
                and (key.startswith(prefix) or prefix.startswith(key))
            ):
                yield from _walk(root, key, prefix, above | {place})
        elif key.startswith(prefix):
            with suppress(FileNotFoundError):  # deleted meanwhile, or a link to nothing
                found = (root / key).stat()
                yield ListedObject(key, found.st_size, _etag(found))


def _sorted_names(path: Path) -> list[tuple[str, bool]]:
    """Name the files and folders, these with a slash: sorted like that, a walk gives the keys
    in order.
    """
    names = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                is_folder = entry.is_dir()
                names.append((f"{entry.name}/" if is_folder else entry.name, is_folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        msg = f"can't list {path}: {error.strerror or error}; check the disk, or the mount"
        raise StorageError(msg) from error
    return sorted(names, key=lambda named: os.fsencode(named[0]))


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns:x}-{found.st_size:x}"


_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems of this machine: a file that is open or mapped stays readable after its name is
gone."""


def is_local(folder: Path) -> bool:
    """Tell whether a folder is known to be on a file system of this machine; where nothing is
    known (not Linux), it isn't.
    """
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    # proc(5): mount id, parent id, device, root, mount point, options, any number of tags, "-",
    # file system, ...
    kinds = {
        rest.split()[0]
        for mount, _, rest in (line.partition(" - ") for line in lines)
        if mount.split()[2] == name
    }
    return bool(kinds) and kinds <= _LOCAL
