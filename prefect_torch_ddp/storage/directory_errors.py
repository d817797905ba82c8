"""Owns what a person is told when a file system refuses."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from prefect_torch_ddp.errors import StorageError

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
    """Turn what the file system says into a `StorageError` that says what was to be done, where, and what helps."""
    try:
        yield
    except OSError as error:
        _refuse(verb, path, error)


def _refuse(verb: str, path: Path, error: OSError) -> NoReturn:
    way_out = _WAYS_OUT.get(error.errno or 0, "check the disk, or the mount")
    msg = f"can't {verb} {path}: {error.strerror or error}; {way_out}"
    raise StorageError(msg) from error
