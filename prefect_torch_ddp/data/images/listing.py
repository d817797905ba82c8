"""The listing of a whole dataset: folders side by side, or an index that `prepare` wrote."""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from prefect_torch_ddp.data.images.cache import CachedReads
from prefect_torch_ddp.data.images.columns import encoded, read_rows, write_rows
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.protocol import ListedObject, ListsLevels, Readable, ReadsMany

NUM_FOLDERS = 8
"""Listed at the same time."""
NUM_AHEAD = 4000
"""Objects of a folder that wait for their turn: four requests to S3."""
FORMAT = "prefect-torch-ddp/objects/1"
INDEX_NAME = "objects.jsonl.gz"
COLUMNS = ("key", "num_bytes", "etag")


def list_dataset(source: ReadsMany, prefix: str = "") -> Iterator[ListedObject]:
    """Yield what `source.list_objects(prefix)` yields; lists folders at the same time if it can.

    Raises:
        StorageError: it can't be listed.
    """
    if isinstance(source, CachedReads):  # listings aren't kept
        source = source.storage
    if not isinstance(source, ListsLevels):
        return source.list_objects(prefix)
    return _side_by_side(source, source.list_level(prefix))


def digest_of_listing(source: ReadsMany) -> str:
    """Return a digest of all names, sizes and ETags, which any change changes."""
    digest = hashlib.sha256()
    for item in list_dataset(source):
        digest.update(encoded(repr((item.key, item.num_bytes, item.etag))))
    return digest.hexdigest()


def _side_by_side(source: ReadsMany, level: Iterator[ListedObject | str]) -> Iterator[ListedObject]:
    pool = ThreadPoolExecutor(NUM_FOLDERS, "ptd-list")
    begun: deque[Iterator[ListedObject]] = deque()
    try:
        for entry in level:
            if isinstance(entry, ListedObject):
                begun.append(iter((entry,)))
            else:
                begun.append(_begin(pool, source, entry))
            if len(begun) == NUM_FOLDERS:
                yield from begun.popleft()
        while begun:
            yield from begun.popleft()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _begin(pool: ThreadPoolExecutor, source: ReadsMany, folder: str) -> Iterator[ListedObject]:
    objects = source.list_objects(folder)
    return _objects(pool, objects, pool.submit(_some_of, objects))


def _objects(
    pool: ThreadPoolExecutor, objects: Iterator[ListedObject], some: Future[list[ListedObject]]
) -> Iterator[ListedObject]:
    while listed := some.result():
        some = pool.submit(_some_of, objects)
        yield from listed


def _some_of(objects: Iterator[ListedObject]) -> list[ListedObject]:
    return list(islice(objects, NUM_AHEAD))


def write_index(source: Readable, folder: str | Path) -> int:
    """List a dataset and write its index to a folder, such as `ctx.data` in `prepare`.

    Takes some seconds for 20,000 objects of a bucket, and the same memory for any number.

    Args:
        source: the dataset, such as `ctx.source`.
        folder: exists. The file's name is `objects.jsonl.gz`: JSON lines of names, sizes and
            ETags.

    Returns:
        The number of objects.

    Raises:
        StorageError: it can't be listed.
    """
    rows = ((item.key, item.num_bytes, item.etag) for item in list_dataset(source))
    with (Path(folder) / INDEX_NAME).open("wb") as file:
        return write_rows(file, {"format": FORMAT, "uri": source.uri}, COLUMNS, rows)


def read_index(path: str | Path, uri: str) -> Iterator[ListedObject]:
    """Yield what an index lists below a URI.

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


def _read(path: Path, uri: str) -> Iterator[ListedObject]:
    try:
        with path.open("rb") as file:
            head, rows = read_rows(file, COLUMNS)
            below = _below(head, uri, path)
            for key, num_bytes, etag in rows:
                if key.startswith(below):
                    yield ListedObject(key[len(below) :], num_bytes, etag)
    except InvalidParamsError:
        raise
    except ValueError as error:
        msg = f"the index {path} is damaged ({error}): run prepare again"
        raise InvalidParamsError(msg) from error


def _below(head: dict[str, Any], uri: str, path: Path) -> str:
    """Return the folder of the indexed dataset that a URI names: empty, or with a slash."""
    if head.get("format") != FORMAT:
        msg = f"{path} is no index of the format {FORMAT}: run prepare again"
        raise InvalidParamsError(msg)
    root = head["uri"].rstrip("/")
    if uri != root and not uri.startswith(f"{root}/"):
        msg = f"the index {path} lists {root}, and the dataset is {uri}: give the index of that one"
        raise InvalidParamsError(msg)
    return uri.removeprefix(root).removeprefix("/") + "/" if uri != root else ""
