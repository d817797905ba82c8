"""Files of their own for a loader's forked worker processes, which share the offset they read at.

A fork leaves parent and child one open file, and so one position in it: of two workers that seek
and read, one gets the bytes that the other one asked for. That happens below whatever holds the
file: a Python file, an archive, a library written in C. So each worker opens the files again by
their descriptors, before the user's code runs there, and what holds them notices nothing.
"""

import fcntl
import logging
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)

FDS = Path("/proc/self/fd")

_File: TypeAlias = tuple[int, int]
"""Its device and number there."""


class OwnFiles:
    """The `worker_init_fn` of a loader: gives a worker its own files, then calls the user's.

    Files that can be written are skipped: processes that write to one file need its common end.

    Args:
        and_then: the user's.
    """

    def __init__(self, and_then: Callable[[int], None] | None) -> None:
        self._and_then = and_then
        self._offsets: Mapping[int, tuple[int, _File]] = {}

    def note(self) -> None:
        """Remember, before workers are forked, which files are open and at which offset."""
        self._offsets = {fd: at for fd in _files_to_read() if (at := _offset_in(fd)) is not None}

    def __call__(self, worker: int) -> None:
        """Begin a worker."""
        for fd, (offset, file) in self._offsets.items():
            # A thread, such as one that reads ahead, may have closed it before the fork: then the
            # number belongs to something else by now, such as a worker's pipe.
            if _is_read_only_file(fd) and _file_of(fd) == file:
                _reopen(fd, offset)
        if self._and_then is not None:
            self._and_then(worker)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the files out: a process that isn't forked hasn't got them."""
        return self.__dict__ | {"_offsets": {}}


def _offset_in(fd: int) -> tuple[int, _File] | None:
    """Return the offset in a file, and which file it is; None if it has just been closed."""
    try:
        return os.lseek(fd, 0, os.SEEK_CUR), _file_of(fd)
    except OSError:
        return None


def _file_of(fd: int) -> _File:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _files_to_read() -> list[int]:
    if not FDS.is_dir():  # not on Linux
        return []
    return [fd for fd in (int(each.name) for each in FDS.iterdir()) if _is_read_only_file(fd)]


def _is_read_only_file(fd: int) -> bool:
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:  # closed again, as that of the listing is
        return False
    return is_file and flags & os.O_ACCMODE == os.O_RDONLY and not flags & os.O_PATH


def _reopen(fd: int, offset: int) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NOFOLLOW  # the descriptor's name is a link
    try:
        own = os.open(FDS / str(fd), flags)
    except OSError as error:
        logger.warning(
            "a loader's worker processes share the read position of %s, which can't be opened "
            "again (%s): a dataset that reads it gets other samples' bytes; have it open the "
            "file when a worker first reads",
            (FDS / str(fd)).readlink(),
            error,
        )
        return
    os.lseek(own, offset, os.SEEK_SET)
    os.dup2(own, fd, inheritable=os.get_inheritable(fd))
    os.close(own)
