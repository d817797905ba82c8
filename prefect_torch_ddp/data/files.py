"""Owns how `prepare` reads whole files of the raw data: many at once, by their names."""

from collections.abc import Iterator
from itertools import islice

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.protocol import ObjectPart, Readable

NUM_AT_ONCE = 64


def read_files(source: Readable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of all files whose name begins with a text, by name; 64 are in
    memory at a time.

    Args:
        source: such as `ctx.source`.
        prefix: a folder with its slash, the begin of a name, or a whole name.

    Raises:
        StorageError: one can't be listed or read.
    """
    listed = iter(source.list_objects(prefix))
    while some := [
        ObjectPart(item.key, item.num_bytes, None, item.etag)
        for item in islice(listed, NUM_AT_ONCE)
    ]:
        for part, content in zip(some, source.read_many(some), strict=True):
            if isinstance(content, StorageError):
                raise content
            yield part.key, content
