"""Owns a storage under a prefix of an S3 bucket: whole objects, checked end to end, bounded
retries, conditional writes.
"""

import hashlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from prefect_torch_ddp.errors import BadKeyError, InvalidParamsError
from prefect_torch_ddp.storage.keys import check_key, check_prefix, is_key
from prefect_torch_ddp.storage.probe import probe
from prefect_torch_ddp.storage.protocol import Contents, ListedObject, ObjectPart, StoredObject
from prefect_torch_ddp.storage.s3.client import client_of
from prefect_torch_ddp.storage.s3.errors import explained
from prefect_torch_ddp.storage.s3.lean.get import getter_of
from prefect_torch_ddp.storage.s3.listing import level_below, objects_below, uploads_below
from prefect_torch_ddp.storage.s3.retries import in_attempts
from prefect_torch_ddp.storage.s3.transfer import DIGEST, download, upload_in_parts

T = TypeVar("T")

MAX_NAME_BYTES = 1024
MULTIPART_FROM_BYTES = 64 * 2**20
PART_BYTES = 16 * 2**20


@dataclass(frozen=True)
class S3Storage:
    """A description of a bucket, a prefix and how to get there; what is left out is found as
    AWS's own tools find it.
    """

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
    give_up_after_s: float = 100.0
    """No request is tried again later than that after its first try."""

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
        """Return the whole object; raise `ObjectNotFoundError` where there is none.

        What breaks in the body is out of reach of botocore's own retries, and not of ours.
        """
        name = self._name(key)
        where = {"Bucket": self.bucket, "Key": name}
        again = partial(self.ask, "read", name)
        sizes = MULTIPART_FROM_BYTES, PART_BYTES
        return self.ask("read", name, lambda client: download(client, again, where, *sizes))

    def write(self, key: str, data: bytes | memoryview) -> None:
        """Write the whole object, replacing what was there; readers see the old or the new,
        never a part.
        """
        name, metadata = self._name(key), {DIGEST: hashlib.sha256(data).hexdigest()}
        if len(data) < MULTIPART_FROM_BYTES:
            body = bytes(data)  # no copy of what is bytes already
            self._request("write", name, "put_object", Body=body, Metadata=metadata)
        else:
            upload_in_parts(partial(self._request, "write", name), data, PART_BYTES, metadata)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Write the object unless one exists; return whether this call wrote it.

        Exactly one of several racing callers wins.
        """
        name = self._name(key)
        metadata = {DIGEST: hashlib.sha256(data).hexdigest(), "writer": uuid.uuid4().hex}
        # One single PUT, whatever the size: several stores ignore a condition on the end of a
        # multipart upload.
        put = partial(_put_if_absent, Bucket=self.bucket, Key=name, Body=data, Metadata=metadata)
        return self.ask("write", name, put)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose key begins with `prefix` (a string prefix), in key order;
        half-written ones never show.
        """
        check_prefix(prefix)
        return (
            StoredObject(item.key, item.num_bytes)
            for item in objects_below(self, prefix)
            if is_key(item.key)
        )

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """Read all parts by one request each, on kept connections; a failure is that part's
        value, whose name may be any.
        """
        return getter_of(self).get_many(parts)

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name begins with `prefix` (a string prefix), sorted by
        name.
        """
        return objects_below(self, prefix)

    def list_level(self, prefix: str) -> Iterator[ListedObject | str]:
        """Yield the objects whose name goes on without a slash after `prefix`, and the folders,
        sorted.
        """
        return level_below(self, prefix)

    def delete(self, key: str) -> None:
        """Delete the object; deleting an absent one is no error."""
        self._request("delete", self._name(key), "delete_object")

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        """Abort uploads in parts below `prefix` of which `is_over(key)` says so: they are paid
        for, and never listed.
        """
        check_prefix(prefix)
        root = self.name_of("")
        for upload in list(uploads_below(self, root + prefix)):
            if is_over(upload["Key"].removeprefix(root)):
                self._request(
                    "abort the upload of",
                    upload["Key"],
                    "abort_multipart_upload",
                    UploadId=upload["UploadId"],
                )

    def check_writable(self) -> None:
        """Write, conditionally write, read and delete a small probe; `StorageError` says what
        is wrong.
        """
        probe(self)

    def _refuse_impossible(self) -> None:
        if not self.bucket or "/" in self.bucket:
            msg = f"{self.bucket!r} can't be the name of a bucket; write s3://bucket/prefix"
            raise InvalidParamsError(msg)
        if (self.access_key_id is None) != (self.secret_access_key is None):
            msg = f"{self.uri} has one of access_key_id and secret_access_key; give both, or none to use this machine's credentials"
            raise InvalidParamsError(msg)
        if self.anonymous and (self.access_key_id or self.profile):
            msg = f"{self.uri} is to be used anonymously and has credentials; give one or the other"
            raise InvalidParamsError(msg)
        if (
            not min(self.connect_timeout_s, self.read_timeout_s, self.give_up_after_s) > 0
            or self.max_attempts < 1
        ):
            msg = f"the limits of {self.uri} can't be kept: timeouts are more than 0 seconds, and there is at least 1 attempt"
            raise InvalidParamsError(msg)
        if self.endpoint_url is not None:
            parts = urlsplit(self.endpoint_url)
            if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
                msg = f"the endpoint of {self.uri} can't be used; write it like https://host:9000, credentials apart"
                raise InvalidParamsError(msg)

    def _name(self, key: str) -> str:
        check_key(key)
        name = self.name_of(key)
        if len(name.encode()) > MAX_NAME_BYTES:
            msg = f"{key[:120]!r} is too long below {self.uri}: S3 allows {MAX_NAME_BYTES} bytes; shorten the prefix"
            raise BadKeyError(msg)
        return name

    def where(self, name: str) -> str:
        """Say where the object of a whole name is, in words that hold no secret."""
        endpoint = (
            self.endpoint_url
            or os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or "AWS"
        )
        return f"s3://{self.bucket}/{name} at {endpoint.rpartition('@')[2]}"

    def name_of(self, key: str) -> str:
        """Return the whole name in the bucket; the key may be any name that is found there."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def ask(self, verb: str, name: str, ask: Callable[[Any], T]) -> T:
        """Give `ask` the client, again where its error may pass; its last error becomes a
        StorageError.
        """
        return in_attempts(
            lambda: ask(client_of(self)),
            self.max_attempts,
            self.give_up_after_s,
            lambda error, tries: explained(verb, self.where(name), error, tries),
        )

    def _request(self, verb: str, name: str, method: str, **arguments: Any) -> Any:
        return self.ask(
            verb,
            name,
            lambda client: getattr(client, method)(Bucket=self.bucket, Key=name, **arguments),
        )


def _put_if_absent(client: Any, **arguments: Any) -> bool:
    from botocore.exceptions import ClientError  # noqa: PLC0415 - boto3 loads when an object is touched

    try:
        client.put_object(IfNoneMatch="*", **arguments)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != HTTPStatus.PRECONDITION_FAILED:
            raise
        return _is_by(
            client, arguments["Bucket"], arguments["Key"], arguments["Metadata"]["writer"]
        )
    return True


def _is_by(client: Any, bucket: str, name: str, writer: str) -> bool:
    """Tell whether the object is the one of this call: its first answer may have been lost, and
    it was asked again.
    """
    from botocore.exceptions import ClientError  # noqa: PLC0415

    try:
        metadata = client.head_object(Bucket=bucket, Key=name)["Metadata"]
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == HTTPStatus.NOT_FOUND:
            return False  # another caller's, and deleted since
        raise
    return bool(metadata.get("writer") == writer)
