"""A storage under a prefix of an S3 bucket: big objects go in parts side by side.

boto3's own way, s3transfer, isn't used: its requests are tried again only by botocore, without an
end in time and without a look at the content, so a silent store would hold up a checkpoint for
many minutes instead of two.
"""

import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from operator import methodcaller
from typing import Any, Self, TypeVar

from prefect_torch_ddp.errors import (
    BadAnswerError,
    BadKeyError,
    InvalidParamsError,
    StorageError,
)
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.storage.names import check_key, check_prefix, is_key
from prefect_torch_ddp.storage.protocol import (
    Contents,
    ListedObject,
    ObjectPart,
    Storage,
    StoredObject,
)
from prefect_torch_ddp.storage.s3.client import S3Location
from prefect_torch_ddp.storage.s3.read import reader_of
from prefect_torch_ddp.storage.s3.retries import ask, request

S = TypeVar("S")
T = TypeVar("T")

MULTIPART_FROM_BYTES = 64 * 2**20
PART_BYTES = 16 * 2**20
NUM_THREADS = 4


@exported_by("prefect_torch_ddp")
@dataclass(frozen=True)
class S3Storage(S3Location, Storage):
    """A storage under a prefix of an S3 bucket.

    Objects are checked end to end, and written conditionally if only one writer may win. Settings
    that you don't give are looked up as AWS's own tools do: in the environment, in the profile, and
    on the machine.

    Args:
        bucket: name of the bucket.
        prefix: what all keys begin with; slashes at its ends are removed. Empty: the whole bucket.
        endpoint_url: URL of a store other than AWS.
        region: region of the bucket.
        profile: profile in AWS's configuration and credentials files.
        access_key_id: id of an access key. Give it together with `secret_access_key`.
        secret_access_key: secret of that key.
        session_token: token of temporary credentials.
        anonymous: send unsigned requests, for public data.
        verify: whether certificates are checked, or the path of a CA bundle.
        addressing_style: "path", "virtual" or "auto". None: as the profile says, otherwise
            botocore's choice.
        connect_timeout_s: seconds to wait for a connection.
        read_timeout_s: seconds to wait for an answer.
        max_attempts: how often a request is sent before it counts as failed.
        give_up_after_s: seconds after the first try of a request beyond which it isn't repeated.

    Raises:
        InvalidParamsError: options contradict each other, or the bucket or endpoint has an invalid
            name.
        BadKeyError: no key can begin with the prefix.

    Example:
        A store that isn't AWS, with the credentials of the environment:

            from prefect_torch_ddp import S3Storage

            storage = S3Storage("bucket", "prefix", endpoint_url="https://s3.example.org")
            print(storage.uri)  # s3://bucket/prefix
    """

    @classmethod
    def from_uri(cls, uri: str, **options: Any) -> Self:
        """Make the storage of `s3://bucket/prefix`.

        Args:
            uri: the URI, with the scheme in either case.
            **options: those of this class.

        Raises:
            InvalidParamsError: the URI can't be used; the message says what to write instead.
        """
        _, slashes, rest = uri.partition("//")
        bucket, _, prefix = rest.partition("/")
        if not slashes or re.search(r"[?#:@\s]", bucket) or re.search(r"^/|[?#]", prefix):
            bucket = ""
        if not bucket:
            msg = (  # the text isn't shown: a secret may be in it
                "that s3:// URI can't be used; write s3://bucket/prefix, and endpoint, region and "
                "credentials into a Prefect block, or as AWS_ACCESS_KEY_ID and the like"
            )
            raise InvalidParamsError(msg)
        try:
            return cls(bucket, prefix, **options)
        except BadKeyError as error:
            msg = f"s3://{rest} can't be used: {error}"
            raise InvalidParamsError(msg) from error

    @property
    def identity(self) -> str:
        """The URI and the endpoint."""
        return f"{self.uri} at {self.endpoint}"

    @property
    def storage_options(self) -> dict[str, Any]:
        """See `Readable.storage_options`; arguments of `s3fs.S3FileSystem`."""
        client = {"region_name": self.region, "verify": self.verify}
        style = {} if self.addressing_style is None else {"addressing_style": self.addressing_style}
        options = {
            "anon": self.anonymous or None,
            "key": self.access_key_id,
            "secret": self.secret_access_key,
            "token": self.session_token,
            "profile": self.profile,
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {name: value for name, value in client.items() if value is not None},
            "config_kwargs": {"s3": style} if style else {},
        }
        return {name: value for name, value in options.items() if value not in (None, {})}

    def below(self, folder: str) -> Self:
        """See `Storage.below`."""
        return replace(self, prefix=self.name_of(check_key(folder)))

    def relocated(self, uri: str) -> Self | None:
        """See `Storage.relocated`; what is in the same bucket."""
        if not uri.lower().startswith("s3://"):
            return None
        other = self.from_uri(uri)
        return replace(self, prefix=other.prefix) if other.bucket == self.bucket else None

    def read(self, key: str) -> bytes:
        """See `Storage.read`; compared with its digest if it was written by us."""
        name = self.name_of(check_key(key))
        return ask(self, "read", name, partial(_download, self, name))

    def write(self, key: str, data: bytes | memoryview) -> None:
        """See `Storage.write`."""
        put = partial(request, self, "write", self.name_of(check_key(key)))
        metadata = _metadata_of(data)
        if len(data) < MULTIPART_FROM_BYTES:
            put("put_object", Body=bytes(data), Metadata=metadata)  # no copy of what is bytes
        else:
            _write_in_parts(put, metadata, memoryview(data))

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """See `Storage.write_if_absent`.

        By one single PUT, whatever the size: several stores ignore a condition on the end of an
        upload in parts.
        """
        name = self.name_of(check_key(key))
        where, metadata = {"Bucket": self.bucket, "Key": name}, _metadata_of(data)
        return ask(self, "write", name, partial(_put_if_absent, where, metadata, data))

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """See `Storage.list`."""
        found = self.list_objects(check_prefix(prefix))
        return (StoredObject(item.key, item.num_bytes) for item in found if is_key(item.key))

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """See `Readable.read_many`; by one request each, on kept connections."""
        return reader_of(self).read_many(parts)

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """See `Readable.list_objects`."""
        for page in self._pages("list", prefix, "list_objects_v2"):
            yield from map(self._listed, page.get("Contents", ()))

    def list_level(self, prefix: str) -> Iterator[ListedObject | str]:
        """Yield names without a slash after `prefix`, and folders (up to their slash), sorted."""
        for page in self._pages("list", prefix, "list_objects_v2", Delimiter="/"):
            found = {item["Key"]: self._listed(item) for item in page.get("Contents", ())}
            folders = {item["Prefix"] for item in page.get("CommonPrefixes", ())}
            for name in sorted(found.keys() | folders):
                yield found[name] if name in found else name.removeprefix(self.name_of(""))

    def delete(self, key: str) -> None:
        """See `Storage.delete`."""
        request(self, "delete", self.name_of(check_key(key)), "delete_object")

    def drop_unfinished(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        """See `Storage.drop_unfinished`; aborts uploads in parts, which are paid for."""
        verb = "list the unfinished uploads of"
        for page in self._pages(verb, check_prefix(prefix), "list_multipart_uploads"):
            for upload in page.get("Uploads", ()):
                name, options = upload["Key"], {"UploadId": upload["UploadId"]}
                if is_over(name.removeprefix(self.name_of(""))):
                    request(self, "abort the upload of", name, "abort_multipart_upload", **options)

    def _pages(
        self, verb: str, prefix: str, method: str, **options: str
    ) -> Iterator[dict[str, Any]]:
        """Yield the answers; what can't be read is asked for again, unlike botocore's paginator."""
        options |= {"Bucket": self.bucket, "Prefix": self.name_of(prefix)}
        while True:
            page = ask(self, verb, options["Prefix"], methodcaller(method, **options))
            yield page
            if not page.get("IsTruncated"):
                return
            names = ("NextContinuationToken", "NextKeyMarker", "NextUploadIdMarker")
            options |= {name.removeprefix("Next"): page[name] for name in names if page.get(name)}

    def _listed(self, found: dict[str, Any]) -> ListedObject:
        key = found["Key"].removeprefix(self.name_of(""))
        return ListedObject(key, found["Size"], found["ETag"].strip('"'))


def _write_in_parts(put: Callable[..., Any], metadata: Mapping[str, str], view: memoryview) -> None:
    upload = {"UploadId": put("create_multipart_upload", Metadata=metadata)["UploadId"]}

    def send(number: int) -> dict[str, Any]:
        body = bytes(view[(number - 1) * PART_BYTES : number * PART_BYTES])
        answer = put("upload_part", PartNumber=number, Body=body, **upload)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        parts = list(_side_by_side(send, range(1, -(-len(view) // PART_BYTES) + 1)))
        _complete(put, metadata["writer"], MultipartUpload={"Parts": parts}, **upload)
    except BaseException:
        # Parts that are never put together are paid for, and in no listing. What can't be
        # aborted now, a later commit drops.
        with suppress(StorageError):
            put("abort_multipart_upload", **upload)
        raise


def _complete(put: Callable[..., Any], writer: str, **arguments: Any) -> None:
    try:
        put("complete_multipart_upload", **arguments)
    except StorageError as error:
        code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
        # The end may have been reached by a request whose answer was lost; asked again, the
        # store knows no such upload.
        if code != "NoSuchUpload" or put("head_object")["Metadata"].get("writer") != writer:
            raise


def _put_if_absent(
    where: Mapping[str, str], metadata: Mapping[str, str], data: bytes, client: Any
) -> bool:
    from botocore.exceptions import ClientError  # noqa: PLC0415 - loaded by the client

    try:
        client.put_object(**where, Body=data, Metadata=metadata, IfNoneMatch="*")
    except ClientError as error:
        if _status(error) != HTTPStatus.PRECONDITION_FAILED:
            raise
    else:
        return True
    try:  # this call's own first answer may have been lost, and it was asked again
        found = client.head_object(**where)["Metadata"].get("writer")
    except ClientError as error:
        if _status(error) != HTTPStatus.NOT_FOUND:
            raise
        return False  # another caller's, and deleted since
    return bool(found == metadata["writer"])


def _metadata_of(data: bytes | memoryview) -> dict[str, str]:
    # An ETag is a digest in some stores and for some objects only. The writer shows whose object
    # is there where an answer was lost.
    return {"sha256": hashlib.sha256(data).hexdigest(), "writer": uuid.uuid4().hex}


def _download(location: S3Location, name: str, client: Any) -> bytes:
    where = {"Bucket": location.bucket, "Key": name}
    answer = client.get_object(**where)
    num_bytes = answer["ContentLength"]
    is_big = num_bytes >= MULTIPART_FROM_BYTES
    with answer["Body"] as body:  # without a limit it compares its length with the one announced
        first: bytes = body.read(PART_BYTES) if is_big else body.read()
    digest, parts = hashlib.sha256(first), [first]
    starts = range(len(first), num_bytes, PART_BYTES) if is_big else ()
    read = partial(_read_range, {**where, "IfMatch": answer["ETag"]}, num_bytes)
    # In order: each is hashed while the next ones arrive. One that fails is read again by itself.
    for part in _side_by_side(lambda at: ask(location, "read", name, partial(read, at)), starts):
        if not part:
            msg = "it was overwritten while it was read"
            raise BadAnswerError(msg)
        digest.update(part)
        parts.append(part)
    written = answer["Metadata"].get("sha256")
    if written is not None and digest.hexdigest() != written:
        msg = f"{num_bytes} bytes came whose sha256 is not that of what was written, {written}"
        raise BadAnswerError(msg)
    return b"".join(parts)  # no copy of a single one


def _read_range(where: dict[str, str], num_bytes: int, start: int, client: Any) -> bytes:
    """Return a part; none of it where the object is another one by now."""
    from botocore.exceptions import ClientError  # noqa: PLC0415 - loaded by the client

    stop = min(start + PART_BYTES, num_bytes)
    try:
        answer = client.get_object(**where, Range=f"bytes={start}-{stop - 1}")
    except ClientError as error:
        if _status(error) != HTTPStatus.PRECONDITION_FAILED:
            raise
        return b""
    with answer["Body"] as body:
        part: bytes = body.read()
    if len(part) != stop - start:
        msg = f"{len(part)} bytes came, not the {stop - start} that were asked for"
        raise BadAnswerError(msg)
    return part


def _status(error: Any) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _side_by_side(function: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ptd-parts")
    try:
        yield from pool.map(function, items)
    finally:
        # All have ended before an abort: a part that comes after it would stay.
        pool.shutdown(wait=True, cancel_futures=True)
