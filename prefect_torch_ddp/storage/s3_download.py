"""Owns how an object is read whole: a big one in parts, several at once; checked by the digest that was written with it."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from prefect_torch_ddp.storage.s3_attempts import DamagedError

DIGEST = "sha256"
"""In each object's own metadata, since an ETag is a digest in some stores and for some objects only."""
NUM_THREADS = 4


class Again(Protocol):
    """Gives a function the client, again where its error may pass; raises StorageError."""

    def __call__(self, ask: Callable[[Any], Any]) -> Any:
        """Return what it returns."""
        ...


def download(client: Any, again: Again, where: dict[str, str], whole_below_bytes: int, part_bytes: int) -> bytes:
    """Return an object's content.

    Args:
        client: boto3's.
        again: for the later parts of a big object, so that one that fails is no reason to read all anew.
        where: its bucket and key.
        whole_below_bytes: a smaller one is read by one request.
        part_bytes: of each part of a bigger one.

    Raises:
        DamagedError: it isn't what was written, or was overwritten meanwhile: to be read again.
    """
    answer = client.get_object(**where)
    body, num_bytes = answer["Body"], answer["ContentLength"]
    try:
        # Without a limit it compares its length with the one announced.
        first: bytes = body.read() if num_bytes < whole_below_bytes else body.read(part_bytes)
    finally:
        body.close()
    digest = hashlib.sha256(first)
    parts = [first]
    if len(first) < num_bytes:
        starts = range(len(first), num_bytes, part_bytes)
        ranges = [(start, min(start + part_bytes, num_bytes) - 1) for start in starts]
        for part in _later_parts(again, {**where, "IfMatch": answer["ETag"]}, ranges):
            digest.update(part)
            parts.append(part)
    written = answer["Metadata"].get(DIGEST)
    if written is not None and digest.hexdigest() != written:
        msg = f"{num_bytes} bytes came whose sha256 is not that of what was written, {written}"
        raise DamagedError(msg)
    return b"".join(parts)  # no copy of a single one


def _later_parts(again: Again, where: dict[str, str], ranges: list[tuple[int, int]]) -> Iterator[bytes]:
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prefect-torch-ddp-download")
    try:
        # In order: each is hashed while those behind it arrive.
        for part in pool.map(lambda of: again(partial(_read_range, where=where, first=of[0], last=of[1])), ranges):
            if part is None:
                msg = "it was overwritten while it was read"
                raise DamagedError(msg)
            yield part
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _read_range(client: Any, where: dict[str, str], first: int, last: int) -> bytes | None:
    """Return a part; None where the object is another one by now."""
    from botocore.exceptions import ClientError  # noqa: PLC0415 - boto3 loads when an object is touched

    try:
        answer = client.get_object(**where, Range=f"bytes={first}-{last}")
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == HTTPStatus.PRECONDITION_FAILED:
            return None
        raise
    body = answer["Body"]
    try:
        part: bytes = body.read()
    finally:
        body.close()
    if len(part) != last - first + 1:
        msg = f"{len(part)} bytes came, not the {last - first + 1} that were asked for"
        raise DamagedError(msg)
    return part
