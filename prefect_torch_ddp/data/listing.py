"""Owns the listing of a whole dataset: its folders side by side, in order, in bounded memory whatever their number."""

import hashlib
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from queue import Full, Queue

from prefect_torch_ddp.data.cache import CachedReads
from prefect_torch_ddp.storage.objects import ListedObject, ListsLevels, ReadsMany

NUM_FOLDERS = 8
"""Listed at the same time."""
PAGE = 1000
NUM_PAGES = 4
"""That wait for their turn, of a folder."""


def list_dataset(source: ReadsMany, prefix: str = "") -> Iterator[ListedObject]:
    """Yield what `source.list_objects(prefix)` yields; where levels can be listed, folders are listed at the same time.

    Raises:
        StorageError: it can't be listed.
    """
    if isinstance(source, CachedReads):  # listings aren't kept
        source = source.storage
    if not isinstance(source, ListsLevels):
        return source.list_objects(prefix)
    return _side_by_side(source, source.list_level(prefix))


def digest_of_listing(source: ReadsMany) -> str:
    """Return a digest of all names, sizes and ETags: the same as long as nobody changes anything."""
    digest = hashlib.sha256()
    for item in list_dataset(source):
        digest.update(repr((item.key, item.num_bytes, item.etag)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _side_by_side(source: ReadsMany, level: Iterator[ListedObject | str]) -> Iterator[ListedObject]:
    begun: deque[ListedObject | _Folder] = deque()
    try:
        for entry in level:
            begun.append(_Folder(source, entry) if isinstance(entry, str) else entry)
            while sum(isinstance(one, _Folder) for one in begun) >= NUM_FOLDERS or isinstance(begun[0], ListedObject):
                yield from _listed(begun.popleft())
                if not begun:
                    break
        while begun:
            yield from _listed(begun.popleft())
    finally:
        for one in begun:
            if isinstance(one, _Folder):
                one.stop()


def _listed(one: "ListedObject | _Folder") -> Iterator[ListedObject]:
    if isinstance(one, ListedObject):
        return iter((one,))
    return one.objects()


class _Folder:
    """A folder that a thread lists, some pages ahead of who reads them."""

    def __init__(self, source: ReadsMany, prefix: str) -> None:
        self._pages: Queue[list[ListedObject] | BaseException] = Queue(NUM_PAGES)
        self._stopped = threading.Event()
        threading.Thread(target=self._list, args=(source, prefix), name="ptd-list", daemon=True).start()

    def objects(self) -> Iterator[ListedObject]:
        """Yield its objects; a thread that failed raises here."""
        try:
            while page := self._pages.get():
                if isinstance(page, BaseException):
                    raise page
                yield from page
        finally:
            self.stop()

    def stop(self) -> None:
        """Have the thread end."""
        self._stopped.set()

    def _list(self, source: ReadsMany, prefix: str) -> None:
        try:
            objects = source.list_objects(prefix)
            while page := list(islice(objects, PAGE)):
                self._put(page)
                if self._stopped.is_set():
                    return
            self._put([])
        except BaseException as error:  # noqa: BLE001 - it belongs to who reads
            self._put(error)

    def _put(self, page: list[ListedObject] | BaseException) -> None:
        while not self._stopped.is_set():
            with suppress(Full):
                self._pages.put(page, timeout=0.2)
                return
