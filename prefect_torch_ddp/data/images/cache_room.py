"""Owns how much a cache may hold: the count that all processes of a host share, and which
entries go when it is full.
"""

import fcntl
import os
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate

LAST_USE_STEP_S = 3600.0
"""A file's time says when it was last used, to this exactness: touching it at each read would
cost."""
OUTDATED_AFTER_S = 24 * 3600.0
LOOK_AGAIN_S = 60.0
SPARED_PART = 10
"""A tenth of the room is made free at a time."""
PATIENCE_S, POLL_S = 1.0, 0.002
_COUNT = struct.Struct("<qd")


class CacheRoom:
    """The room of a whole cache, over all its sources and all processes.

    Entries that a running process may want in each epoch aren't replaced by each other: where a
    dataset is larger than the cache, a cache that keeps what it has serves its share of each
    epoch, and one that replaces the least recently used serves less and writes all the time
    (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021, call it
    MinIO). So what goes is what belongs to sources that no process has open, and what was used
    by nobody for a day, oldest first.
    """

    def __init__(self, root: str, own_source: str, max_bytes: int) -> None:
        """Open the lock of the source's folder."""
        self.root = root
        self.max_bytes = max_bytes
        self.is_full = False
        """Whether at the last try there was nothing that could go."""
        self._in_use = _open(f"{own_source}/in_use.lock")
        self._is_held = False

    def hold(self) -> None:
        """Hold the source's lock, shared, for as long as this process or a fork of it lives:
        its entries are in use.
        """
        # Without waiting: a process that makes room may have it just now, and a stopped one
        # would for ever.
        self._is_held = self._is_held or _try_lock(self._in_use, fcntl.LOCK_SH)

    @contextmanager
    def taken(self, sizes: Sequence[int]) -> Iterator[int]:
        """Give how many of the entries, from the first on, may be written in the block; their
        bytes are counted before.

        A process that is killed in between leaves the count too high, never too low. Never
        waits long for another process: where one makes room just now, or is stopped in the
        midst of it, nothing is granted.
        """
        writing = _open(f"{self.root}/writing.lock")
        try:
            yield self._granted(sizes, writing)
        finally:
            os.close(writing)

    def _granted(self, sizes: Sequence[int], writing: int) -> int:
        try:
            if not _try_lock(writing, fcntl.LOCK_SH):
                return 0
            granted = self._take(sizes)
            if granted == len(sizes) or self.is_full:
                return granted
            # What others have taken and not written yet can't be seen on disk, so the count is
            # only made anew when there is none.
            self._give_back(sizes[:granted])
            if _try_lock(writing, fcntl.LOCK_EX):
                self._make_room(sum(sizes))
            return self._take(sizes) if _try_lock(writing, fcntl.LOCK_SH) else 0
        except BlockingIOError:
            return 0

    def _take(self, sizes: Sequence[int]) -> int:
        with self._count() as count:
            ends = list(accumulate(sizes, initial=count.num_bytes))
            granted = sum(end <= self.max_bytes for end in ends[1:])
            count.num_bytes = ends[granted]
            self.is_full = granted < len(sizes) and time.time() < count.full_until
        return granted

    def _give_back(self, sizes: Sequence[int]) -> None:
        with self._count() as count:
            count.num_bytes -= sum(sizes)

    def _make_room(self, wanted: int) -> None:
        with self._count() as count:
            total, freed = self._evict(wanted)
            count.num_bytes = total - freed
            if count.num_bytes + wanted > self.max_bytes:
                count.full_until = time.time() + LOOK_AGAIN_S

    def _evict(self, wanted: int) -> tuple[int, int]:
        """Make room for as many bytes at least; return the bytes of all entries found, and
        those of the entries removed.
        """
        by_hour: Counter[int] = Counter()
        total = 0
        for size, last_use, may_go, _ in self._entries():
            total += size
            if may_go:
                by_hour[int(last_use // LAST_USE_STEP_S)] += size
        excess = total + max(wanted, self.max_bytes // SPARED_PART) - self.max_bytes
        if excess <= 0:
            return total, 0
        hours = sorted(by_hour)
        reached = (
            hour
            for hour, freed in zip(hours, accumulate(by_hour[hour] for hour in hours), strict=True)
            if freed >= excess
        )
        return total, self._remove_until(next(reached, hours[-1] if hours else 0), excess)

    def _remove_until(self, last_hour: int, excess: int) -> int:
        """Remove entries last used in this hour or before; those of the hour itself only as far
        as needed.
        """
        freed = 0
        for is_last in (False, True):
            for size, last_use, may_go, path in self._entries():
                hour = int(last_use // LAST_USE_STEP_S)
                if (
                    may_go
                    and freed < excess
                    and (hour == last_hour if is_last else hour < last_hour)
                ):
                    with suppress(OSError):
                        os.unlink(path)  # noqa: PTH108
                        freed += size
        return freed

    def _entries(self) -> Iterator[tuple[int, float, bool, str]]:
        """Yield size, last use, whether it may go, and path of each entry, without holding them
        all.
        """
        outdated = time.time() - OUTDATED_AFTER_S
        for source in _folders_in(self.root):
            with _unused(source) as is_unused:
                for shelf in _folders_in(source):
                    if os.path.basename(shelf) == "unfinished":  # noqa: PTH119
                        continue
                    for entry in _scan(shelf):
                        with suppress(FileNotFoundError):  # removed meanwhile
                            status = entry.stat(follow_symlinks=False)
                            yield (
                                status.st_size,
                                status.st_mtime,
                                is_unused or status.st_mtime < outdated,
                                entry.path,
                            )

    @contextmanager
    def _count(self) -> Iterator["_Count"]:
        """Give the shared count, alone."""
        file = _open(f"{self.root}/count")
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not _try_lock(file, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise BlockingIOError
                time.sleep(POLL_S)
            stored = os.pread(file, _COUNT.size, 0)
            if len(stored) == _COUNT.size:
                count = _Count(*_COUNT.unpack(stored))
            else:  # new, or somebody removed the file
                count = _Count(sum(entry[0] for entry in self._entries()), 0.0)
            yield count
            os.pwrite(file, _COUNT.pack(count.num_bytes, count.full_until), 0)
        finally:
            os.close(file)


@dataclass
class _Count:
    """What the shared file says."""

    num_bytes: int
    full_until: float
    """No room can be made before this time (seconds since 1970): looking for it at each write
    would cost."""


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _try_lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _unused(source: str) -> Iterator[bool]:
    """Tell whether no process has a source open, and keep it so."""
    file = _open(f"{source}/in_use.lock")
    try:
        yield _try_lock(file, fcntl.LOCK_EX)
    finally:
        os.close(file)


def _folders_in(path: str) -> list[str]:
    return sorted(entry.path for entry in _scan(path) if entry.is_dir(follow_symlinks=False))


def _scan(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except FileNotFoundError:
        return
