"""Reading an object, or a range of one, as it was listed."""

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.protocol import ListedObject, ObjectPart, Readable


def read_range(source: Readable, listed: ListedObject, start: int, end: int) -> bytes:
    """Read a range of an object.

    Raises:
        StorageError: it can't be read, or has changed since it was listed.
    """
    is_whole = (start, end) == (0, listed.num_bytes)
    part = ObjectPart(listed.key, end - start, None if is_whole else start, listed.etag)
    (content,) = source.read_many([part])
    if isinstance(content, StorageError):
        raise content
    return content
