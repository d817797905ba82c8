"""Owns the upload of a big object in parts, several at once: whole at its end, or aborted.

Owns how an object is read whole: a big one in parts, several at once; checked by the digest
that was written with it.
"""

import hashlib
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.s3.retries import DamagedError

NUM_THREADS = 4


class Request(Protocol):
    """Makes a request of the client's, again where its error may pass; raises StorageError."""

    def __call__(self, method: str, **arguments: Any) -> Any:
        """Return the answer.

        Args:
            method: of boto3's client.
            arguments: besides bucket and key.
        """
        ...


def upload_in_parts(
    ask: Request, data: bytes | memoryview, part_bytes: int, metadata: dict[str, str]
) -> None:
    """Upload an object.

    Args:
        ask: makes the requests.
        data: the object.
        part_bytes: of each part but the last one.
        metadata: of the object.

    Raises:
        StorageError: it could not be uploaded; nothing of it is left where the store could
            still be reached.
    """
    writer = uuid.uuid4().hex
    upload_id = ask("create_multipart_upload", Metadata={**metadata, "writer": writer})["UploadId"]
    try:
        parts = _upload(
            lambda **part: ask("upload_part", UploadId=upload_id, **part),
            memoryview(data),
            part_bytes,
        )
        _complete(ask, upload_id, parts, writer)
    except BaseException:
        # Parts that are never put together are paid for, and in no listing. What can't be
        # aborted now, a later commit drops.
        with suppress(StorageError):
            ask("abort_multipart_upload", UploadId=upload_id)
        raise


def _upload(send: Callable[..., Any], data: memoryview, part_bytes: int) -> list[dict[str, Any]]:
    starts = range(0, len(data), part_bytes)

    def upload(number: int) -> dict[str, Any]:
        start = starts[number - 1]
        answer = send(PartNumber=number, Body=bytes(data[start : start + part_bytes]))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prefect-torch-ddp-upload")
    try:
        return list(pool.map(upload, range(1, len(starts) + 1)))
    finally:
        # All have ended before an abort: a part that comes after it would stay.
        pool.shutdown(wait=True, cancel_futures=True)


def _complete(ask: Request, upload_id: str, parts: list[dict[str, Any]], writer: str) -> None:
    try:
        ask("complete_multipart_upload", UploadId=upload_id, MultipartUpload={"Parts": parts})
    except StorageError as error:
        code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
        # The end may have been reached by a request whose answer was lost; asked again, the
        # store knows no such upload.
        if code != "NoSuchUpload" or ask("head_object")["Metadata"].get("writer") != writer:
            raise


DIGEST = "sha256"
"""In each object's own metadata, since an ETag is a digest in some stores and for some objects
only."""
NUM_THREADS = 4


class Again(Protocol):
    """Gives a function the client, again where its error may pass; raises StorageError."""

    def __call__(self, ask: Callable[[Any], Any]) -> Any:
        """Return what it returns."""
        ...


def download(
    client: Any, again: Again, where: dict[str, str], whole_below_bytes: int, part_bytes: int
) -> bytes:
    """Return an object's content.

    Args:
        client: boto3's.
        again: for the later parts of a big object, so that one that fails is no reason to read
            all anew.
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


def _later_parts(
    again: Again, where: dict[str, str], ranges: list[tuple[int, int]]
) -> Iterator[bytes]:
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prefect-torch-ddp-download")
    try:
        # In order: each is hashed while those behind it arrive.
        for part in pool.map(
            lambda of: again(partial(_read_range, where=where, first=of[0], last=of[1])), ranges
        ):
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
