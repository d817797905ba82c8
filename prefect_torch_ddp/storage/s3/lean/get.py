"""Owns how many objects are read from S3: a lean client, a seventh of boto3's CPU per GET."""

import hashlib
import http.client
import re
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from prefect_torch_ddp.errors import ObjectChangedError, StorageError
from prefect_torch_ddp.storage.fan_out import FanOut
from prefect_torch_ddp.storage.protocol import Contents, ObjectPart
from prefect_torch_ddp.storage.s3.client import MadeOnce
from prefect_torch_ddp.storage.s3.errors import explained, unanswered
from prefect_torch_ddp.storage.s3.lean.connection import Connection, Route
from prefect_torch_ddp.storage.s3.lean.sign import GetSigner
from prefect_torch_ddp.storage.s3.lean.target import Target, credentials_of, target_of
from prefect_torch_ddp.storage.s3.lean.wire import Answer, request_of
from prefect_torch_ddp.storage.s3.retries import DamagedError, Tries, in_attempts

if TYPE_CHECKING:
    from prefect_torch_ddp.storage.s3.storage import S3Storage


NUM_CONNECTIONS = 32
"""Of a process to one storage, at most: enough to hide 20 ms a request from two loader
processes."""
_CHANGED = "the object changed since it was listed: list it again, by running prepare again, or keep data in use unchanged"


class _OtherObjectError(DamagedError):
    """What came isn't the object that was listed: by a proxy's mistake perhaps, which another
    attempt may not see.
    """


class S3Getter:
    """Reads objects of one storage for one process.

    Threads may share it; one that crossed a fork refuses.
    """

    def __init__(self, storage: "S3Storage") -> None:
        """Find address and credentials; connections are made when they are needed."""
        # Loaded here and not in a thread: a fork while a thread loads a module would leave it
        # half loaded in the child.
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415

        self._storage = storage
        try:
            self._target: Target = target_of(storage)
            self._signer = GetSigner(self._target.url, self._target.region, credentials_of(storage))
        except BotoCoreError as error:
            where = storage.where(storage.name_of(""))
            raise unanswered("read", where, error) from error  # noqa: EM101 - it is a verb
        self._route = Route(self._target, storage.connect_timeout_s)
        self._fan_out: FanOut[Connection, ObjectPart, bytes | StorageError] = FanOut(
            NUM_CONNECTIONS,
            lambda: Connection(self._route, storage.read_timeout_s),
            Connection.close,
        )

    def get_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """See `ReadsMany.read_many`."""
        return self._fan_out.map(self._get, parts)

    def _get(self, line: Connection, part: ObjectPart) -> bytes | StorageError:
        if part.num_bytes == 0 and part.start is not None:
            return b""  # there is no such range
        storage, name = self._storage, self._storage.name_of(part.key)
        ask, explain = partial(self._try, line, name, part), partial(self._explain, name)
        try:
            return in_attempts(
                ask, storage.max_attempts, storage.give_up_after_s, explain, is_one_of_many=True
            )
        except StorageError as error:
            return error

    def _explain(self, name: str, error: Exception, tries: Tries) -> Exception:
        where = self._storage.where(name)
        if isinstance(error, _OtherObjectError):
            return ObjectChangedError(f"can't read {where}: {error}")
        return explained("read", where, error, tries)

    def _try(self, line: Connection, name: str, part: ObjectPart) -> bytes:
        url = self._target.url_of(name)
        path = urlsplit(url).path
        try:
            request = request_of(
                url if self._route.sends_whole_url else path, self._headers(path, part)
            )
        except ValueError as error:
            msg = f"can't read {self._storage.where(name)}: {error}"
            raise StorageError(msg) from None
        try:
            answer = line.ask(request)
        except (OSError, http.client.HTTPException) as error:
            raise _as_botocore(self._storage, error) from error
        if answer.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            self._refuse(name, answer.status, answer.body)
        self._check(name, part, answer)
        return answer.body

    def _headers(self, path: str, part: ObjectPart) -> dict[str, str]:
        headers = {**self._signer.headers(path), **self._route.headers}
        if part.etag is not None:
            headers["If-Match"] = f'"{part.etag}"'
        if part.start is not None:
            headers["Range"] = f"bytes={part.start}-{part.start + part.num_bytes - 1}"
        return headers

    def _refuse(self, name: str, status: int, body: bytes) -> NoReturn:
        from botocore.exceptions import ClientError  # noqa: PLC0415

        if status == HTTPStatus.PRECONDITION_FAILED:
            msg = f"can't read {self._storage.where(name)}: {_CHANGED}"
            raise ObjectChangedError(msg)
        found = re.search(rb"<Code>([\w.-]{1,100})</Code>", body)
        code = found[1].decode() if found else "NoSuchKey" if status == HTTPStatus.NOT_FOUND else ""
        raise ClientError(
            {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject"
        )

    def _check(self, name: str, part: ObjectPart, answer: Answer) -> None:
        """Compare what came with what was listed: range, ETag, length, and MD5 where the ETag
        is one.
        """
        if part.start is not None and answer.status != HTTPStatus.PARTIAL_CONTENT:
            msg = f"can't read a part of {self._storage.where(name)}: the store doesn't know ranges; use one that does"
            raise StorageError(msg)
        given = re.match(r"bytes (\d{1,18})-", answer.headers.get("content-range", ""))
        if part.start is not None and given and int(given[1]) != part.start:
            msg = f"a part from byte {given[1]} came, not from {part.start}"
            raise DamagedError(msg)
        etag = answer.headers.get("etag", "").removeprefix("W/").strip('"')
        if part.etag is not None and etag and etag != part.etag:
            msg = f"{_CHANGED} (its ETag is {etag} now)"
            raise _OtherObjectError(msg)
        if len(answer.body) != part.num_bytes:
            msg = f"{len(answer.body)} bytes came, not {part.num_bytes}"
            if part.etag is None or not answer.has_length:
                msg += f": {_CHANGED}"
                raise _OtherObjectError(msg)
            raise DamagedError(msg)
        if (
            part.start is None
            and _is_md5(etag, answer.headers)
            and hashlib.md5(answer.body, usedforsecurity=False).hexdigest() != etag
        ):
            msg = f"the content's MD5 isn't its ETag {etag}"
            raise DamagedError(msg)


def _is_md5(etag: str, headers: Mapping[str, str]) -> bool:
    """Tell whether an ETag is the content's MD5: not of an upload in parts, nor of content
    under a key of KMS or the caller.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
    """
    if not re.fullmatch("[0-9a-f]{32}", etag):
        return False
    is_by_kms = "kms" in headers.get("x-amz-server-side-encryption", "")
    return not is_by_kms and "x-amz-server-side-encryption-customer-algorithm" not in headers


def _as_botocore(storage: "S3Storage", error: Exception) -> Exception:
    """Name what the network did as botocore would."""
    from botocore import exceptions  # noqa: PLC0415

    endpoint = storage.endpoint_url or "AWS"
    named: Exception
    if isinstance(error, ssl.SSLError):
        named = exceptions.SSLError(
            endpoint_url=endpoint, error=error
        )  # by its text it passes or not
    elif isinstance(error, http.client.IncompleteRead):
        num_bytes = len(error.partial)
        named = exceptions.IncompleteReadError(
            actual_bytes=num_bytes, expected_bytes=num_bytes + (error.expected or 0)
        )
    elif isinstance(error, http.client.HTTPException | ConnectionResetError | BrokenPipeError):
        named = exceptions.ConnectionClosedError(endpoint_url=endpoint, error=type(error).__name__)
    elif isinstance(error, TimeoutError):
        named = exceptions.ReadTimeoutError(endpoint_url=endpoint, error=type(error).__name__)
    else:
        named = exceptions.EndpointConnectionError(
            endpoint_url=endpoint, error=type(error).__name__
        )
    return named


getter_of = MadeOnce(S3Getter).of
"""Return this process's client of a storage; threads may share it."""
