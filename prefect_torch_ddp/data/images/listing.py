"""Owns the listing of a whole dataset: its folders side by side, in order, in bounded memory
whatever their number.

Owns the index of a dataset in a storage: listed once, by `prepare`, in a file that ranks read
instead of listing.
"""

import gzip
import hashlib
import json
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from queue import Full, Queue
from typing import Any

from prefect_torch_ddp.data.images.cache import CachedReads
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import ListedObject, ListsLevels, Readable, ReadsMany

NUM_FOLDERS = 8
"""Listed at the same time."""
PAGE = 1000
NUM_PAGES = 4
"""That wait for their turn, of a folder."""


def list_dataset(source: ReadsMany, prefix: str = "") -> Iterator[ListedObject]:
    """Yield what `source.list_objects(prefix)` yields; where levels can be listed, folders are
    listed at the same time.

    Raises:
        StorageError: it can't be listed.
    """
    if isinstance(source, CachedReads):  # listings aren't kept
        source = source.storage
    if not isinstance(source, ListsLevels):
        return source.list_objects(prefix)
    return _side_by_side(source, source.list_level(prefix))


def digest_of_listing(source: ReadsMany) -> str:
    """Return a digest of all names, sizes and ETags: the same as long as nobody changes
    anything.
    """
    digest = hashlib.sha256()
    for item in list_dataset(source):
        digest.update(
            repr((item.key, item.num_bytes, item.etag)).encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()


def _side_by_side(source: ReadsMany, level: Iterator[ListedObject | str]) -> Iterator[ListedObject]:
    begun: deque[ListedObject | _Folder] = deque()
    try:
        for entry in level:
            begun.append(_Folder(source, entry) if isinstance(entry, str) else entry)
            while sum(isinstance(one, _Folder) for one in begun) >= NUM_FOLDERS or isinstance(
                begun[0], ListedObject
            ):
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
        threading.Thread(
            target=self._list, args=(source, prefix), name="ptd-list", daemon=True
        ).start()

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


FORMAT = "prefect-torch-ddp/objects/1"
INDEX_NAME = "objects.jsonl.gz"


def write_index(source: Readable, folder: str | Path) -> int:
    """List a dataset and write its index to a folder, such as `ctx.data` in `prepare`; return
    the number of objects.

    Takes some seconds for 20,000 objects of a bucket, and the same memory for any number.

    Args:
        source: the dataset, such as `ctx.source`.
        folder: exists. The file's name is `objects.jsonl.gz`: JSON lines of up to 1000 names,
            sizes and ETags.

    Raises:
        StorageError: it can't be listed.
    """
    num_objects, objects = 0, list_dataset(source)
    with gzip.open(Path(folder) / INDEX_NAME, "wt", encoding="utf-8", compresslevel=6) as file:
        file.write(_line({"format": FORMAT, "uri": source.uri}))
        while page := list(islice(objects, PAGE)):
            columns = {
                name: [getattr(item, name) for item in page]
                for name in ("key", "num_bytes", "etag")
            }
            file.write(_line(columns))
            num_objects += len(page)
        file.write(_line({"num_objects": num_objects}))
    return num_objects


def read_index(path: str | Path, uri: str) -> Iterator[ListedObject]:
    """Yield what an index lists below a place.

    Args:
        path: the folder that `write_index` wrote to, or the file.
        uri: of the dataset, or of a folder in it: keys are relative to that.

    Raises:
        InvalidParamsError: there is no such index, or it is another dataset's; or, at its end:
            it is damaged.
    """
    file = Path(path)
    file = file / INDEX_NAME if file.is_dir() else file
    if not file.is_file():
        msg = f"there is no index {file}: write it by write_index(ctx.source, ctx.data) in prepare"
        raise InvalidParamsError(msg)
    return _read(file, uri.rstrip("/"))


def _read(file: Path, uri: str) -> Iterator[ListedObject]:
    num_objects, announced = 0, None
    try:
        with gzip.open(file, "rb") as lines:  # whose checksum is compared where the file ends
            below = _below(json.loads(lines.readline()), uri, file)
            for line in lines:
                columns = json.loads(line)
                if "num_objects" in columns:
                    announced = columns["num_objects"]
                    continue
                num_objects += len(columns["key"])
                listed = map(ListedObject, columns["key"], columns["num_bytes"], columns["etag"])
                yield from listed if not below else _cut(listed, below)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidParamsError):
            raise
        msg = f"the index {file} is damaged ({error}): run prepare again"
        raise InvalidParamsError(msg) from error
    if announced != num_objects:
        msg = f"the index {file} isn't whole: run prepare again"
        raise InvalidParamsError(msg)


def _below(head: dict[str, Any], uri: str, file: Path) -> str:
    """Return where in the indexed dataset a place is."""
    if head.get("format") != FORMAT:
        msg = f"{file} is no index of the format {FORMAT}: run prepare again"
        raise InvalidParamsError(msg)
    root = head["uri"].rstrip("/")
    if uri != root and not uri.startswith(f"{root}/"):
        msg = f"the index {file} lists {root}, and the dataset is {uri}: give the index of that one"
        raise InvalidParamsError(msg)
    return uri.removeprefix(root).removeprefix("/") + "/" if uri != root else ""


def _cut(listed: Iterator[ListedObject], below: str) -> Iterator[ListedObject]:
    for item in listed:
        if item.key.startswith(below):
            yield ListedObject(item.key.removeprefix(below), item.num_bytes, item.etag)


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"
