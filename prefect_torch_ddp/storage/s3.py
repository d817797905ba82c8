"""Owns a storage under a prefix of an S3 bucket: whole objects, bounded retries, conditional writes."""

import io
import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from http import HTTPStatus
from typing import Literal
from urllib.parse import urlsplit

from prefect_torch_ddp.errors import BadKeyError, InvalidParamsError, StorageError
from prefect_torch_ddp.storage.keys import check_key, check_prefix, is_key
from prefect_torch_ddp.storage.probe import probe
from prefect_torch_ddp.storage.protocol import StoredObject
from prefect_torch_ddp.storage.s3_client import client_of
from prefect_torch_ddp.storage.s3_errors import refused, unanswered

MAX_NAME_BYTES = 1024
MULTIPART_FROM_BYTES = 64 * 2**20
PART_BYTES = 16 * 2**20
PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


@dataclass(frozen=True)
class S3Storage:
    """A description of a bucket, a prefix and how to get there; what is left out is found as AWS's own tools find it."""

    bucket: str
    prefix: str = ""
    _: KW_ONLY
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    anonymous: bool = False
    verify: bool | str | None = None
    """Whether certificates are checked, or the path of a CA bundle."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    max_attempts: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", self.prefix.strip("/"))
        if self.prefix:
            check_key(self.prefix)
        self._refuse_impossible()

    @property
    def uri(self) -> str:
        """The root as `s3://bucket/prefix`."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def read(self, key: str) -> bytes:
        """Return the whole object; raise `ObjectNotFoundError` where there is none."""
        name = self._name(key)
        with self._explained("read", name):
            for attempt in range(1, self.max_attempts + 1):
                try:
                    return self._get(name)
                except _TornBodyError as torn:
                    if attempt == self.max_attempts:
                        msg = f"can't read {self._where(name)}: the content broke off {attempt} times ({torn.__cause__})"
                        raise StorageError(msg) from torn.__cause__
                _pause(attempt)
        raise AssertionError

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Write the whole object, replacing what was there; readers see the old or the new, never a part."""
        name = self._name(key)
        with self._explained("write", name):
            if len(data) < MULTIPART_FROM_BYTES:
                client_of(self).put_object(Bucket=self.bucket, Key=name, Body=bytes(data))  # no copy of what is bytes already
            else:
                self._upload_parts(name, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Write the object unless one exists; return whether this call wrote it. Exactly one of several racing callers wins."""
        from botocore.exceptions import ClientError  # noqa: PLC0415 - boto3 loads when an object is touched

        name, writer = self._name(key), uuid.uuid4().hex
        with self._explained("write", name):
            for attempt in range(1, self.max_attempts + 1):
                try:
                    # One single PUT, whatever the size: several stores ignore a condition on the end of a multipart upload.
                    client_of(self).put_object(
                        Bucket=self.bucket, Key=name, Body=data, IfNoneMatch="*", Metadata={"writer": writer}
                    )
                except ClientError as error:
                    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                    if status == HTTPStatus.PRECONDITION_FAILED:
                        return self._is_by(name, writer)
                    if status != HTTPStatus.CONFLICT or attempt == self.max_attempts:
                        raise
                else:
                    return True
                _pause(attempt)
        raise AssertionError

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose key begins with `prefix` (a string prefix), in key order; half-written ones never show."""
        check_prefix(prefix)
        return self._pages(prefix)

    def delete(self, key: str) -> None:
        """Delete the object; deleting an absent one is no error."""
        name = self._name(key)
        with self._explained("delete", name):
            client_of(self).delete_object(Bucket=self.bucket, Key=name)

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        """Abort uploads in parts below `prefix` of which `is_over(key)` says so: they are paid for, and never listed."""
        check_prefix(prefix)
        root = f"{self.prefix}/" if self.prefix else ""
        with self._explained("list the unfinished uploads of", root + prefix):
            pages = client_of(self).get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=root + prefix)
            begun = [(upload["Key"], upload["UploadId"]) for page in pages for upload in page.get("Uploads", ())]
        for name, upload_id in begun:
            if is_over(name.removeprefix(root)):
                with self._explained("abort the upload of", name):
                    client_of(self).abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=upload_id)

    def check_writable(self) -> None:
        """Write, conditionally write, read and delete a small probe; `StorageError` says what is wrong."""
        probe(self)

    def _refuse_impossible(self) -> None:
        if not self.bucket or "/" in self.bucket:
            msg = f"{self.bucket!r} can't be the name of a bucket; write s3://bucket/prefix"
            raise InvalidParamsError(msg)
        if (self.access_key_id is None) != (self.secret_access_key is None):
            msg = (
                f"{self.uri} has one of access_key_id and secret_access_key; give both, or none to use this machine's credentials"
            )
            raise InvalidParamsError(msg)
        if self.anonymous and (self.access_key_id or self.profile):
            msg = f"{self.uri} is to be used anonymously and has credentials; give one or the other"
            raise InvalidParamsError(msg)
        if self.endpoint_url is not None:
            parts = urlsplit(self.endpoint_url)
            if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
                msg = f"the endpoint of {self.uri} can't be used; write it like https://host:9000, credentials apart"
                raise InvalidParamsError(msg)

    def _name(self, key: str) -> str:
        check_key(key)
        name = f"{self.prefix}/{key}" if self.prefix else key
        if len(name.encode()) > MAX_NAME_BYTES:
            msg = f"{key[:120]!r} is too long below {self.uri}: S3 allows {MAX_NAME_BYTES} bytes; shorten the prefix"
            raise BadKeyError(msg)
        return name

    def _where(self, name: str) -> str:
        endpoint = self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
        return f"s3://{self.bucket}/{name} at {endpoint.rpartition('@')[2]}"

    @contextmanager
    def _explained(self, verb: str, name: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

        try:
            yield
        except ClientError as error:
            raise refused(verb, self._where(name), error) from error
        except BotoCoreError as error:
            raise unanswered(verb, self._where(name), error) from error

    def _get(self, name: str) -> bytes:
        """Read once. What breaks in the body is out of reach of botocore's own retries."""
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        body = client_of(self).get_object(Bucket=self.bucket, Key=name)["Body"]
        try:
            data: bytes = body.read()  # which compares its length with the one announced
        except (BotoCoreError, HTTPError, OSError) as error:
            raise _TornBodyError from error
        finally:
            body.close()
        return data

    def _upload_parts(self, name: str, data: bytes | memoryview) -> None:
        from boto3.s3.transfer import TransferConfig  # noqa: PLC0415

        # The managed transfer aborts the upload when a part fails, so none is left to be paid for.
        config = TransferConfig(multipart_threshold=MULTIPART_FROM_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4)
        client_of(self).upload_fileobj(io.BytesIO(data), self.bucket, name, Config=config)

    def _is_by(self, name: str, writer: str) -> bool:
        """Tell whether the object is the one of this call: its first answer may have been lost, and botocore asked again."""
        from botocore.exceptions import ClientError  # noqa: PLC0415

        try:
            metadata = client_of(self).head_object(Bucket=self.bucket, Key=name)["Metadata"]
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == HTTPStatus.NOT_FOUND:
                return False  # another caller's, and deleted since
            raise
        return bool(metadata.get("writer") == writer)

    def _pages(self, prefix: str) -> Iterator[StoredObject]:
        root = f"{self.prefix}/" if self.prefix else ""
        with self._explained("list", root + prefix):
            for page in client_of(self).get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=root + prefix):
                for found in page.get("Contents", ()):
                    key = found["Key"].removeprefix(root)
                    if is_key(key):
                        yield StoredObject(key=key, num_bytes=found["Size"])


class _TornBodyError(Exception):
    """An object's content broke off; `__cause__` says how."""


def _pause(attempt: int) -> None:
    """Wait longer after each attempt, by chance, so that ranks that failed together don't come back together."""
    time.sleep(random.uniform(0, min(LONGEST_PAUSE_S, PAUSE_S * 2**attempt)))  # noqa: S311 - no secret depends on it
