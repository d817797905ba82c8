"""Owns the upload of a big object in parts, several at once: whole at its end, or aborted."""

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from prefect_torch_ddp.errors import StorageError

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


def upload_in_parts(ask: Request, data: bytes | memoryview, part_bytes: int, metadata: dict[str, str]) -> None:
    """Upload an object.

    Args:
        ask: makes the requests.
        data: the object.
        part_bytes: of each part but the last one.
        metadata: of the object.

    Raises:
        StorageError: it could not be uploaded; nothing of it is left where the store could still be reached.
    """
    writer = uuid.uuid4().hex
    upload_id = ask("create_multipart_upload", Metadata={**metadata, "writer": writer})["UploadId"]
    try:
        parts = _upload(lambda **part: ask("upload_part", UploadId=upload_id, **part), memoryview(data), part_bytes)
        _complete(ask, upload_id, parts, writer)
    except BaseException:
        # Parts that are never put together are paid for, and in no listing. What can't be aborted now, a later commit drops.
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
        # The end may have been reached by a request whose answer was lost; asked again, the store knows no such upload.
        if code != "NoSuchUpload" or ask("head_object")["Metadata"].get("writer") != writer:
            raise
