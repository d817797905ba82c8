"""Owns the index of a dataset in a storage: listed once, by `prepare`, in a file that ranks read instead of listing."""

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from prefect_torch_ddp.data.listing import PAGE, list_dataset
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.objects import ListedObject, Readable

FORMAT = "prefect-torch-ddp/objects/1"
INDEX_NAME = "objects.jsonl.gz"


def write_index(source: Readable, folder: str | Path) -> int:
    """List a dataset and write its index to a folder, such as `rank.data` in `prepare`; return the number of objects.

    Takes some seconds for 20,000 objects of a bucket, and the same memory for any number.

    Args:
        source: the dataset, such as `rank.source`.
        folder: exists. The file's name is `objects.jsonl.gz`: JSON lines of up to 1000 names, sizes and ETags.

    Raises:
        StorageError: it can't be listed.
    """
    num_objects, objects = 0, list_dataset(source)
    with gzip.open(Path(folder) / INDEX_NAME, "wt", encoding="utf-8", compresslevel=6) as file:
        file.write(_line({"format": FORMAT, "uri": source.uri}))
        while page := list(islice(objects, PAGE)):
            columns = {name: [getattr(item, name) for item in page] for name in ("key", "num_bytes", "etag")}
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
        InvalidParamsError: there is no such index, or it is another dataset's; or, at its end: it is damaged.
    """
    file = Path(path)
    file = file / INDEX_NAME if file.is_dir() else file
    if not file.is_file():
        msg = f"there is no index {file}: write it by write_index(rank.source, rank.data) in prepare"
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
