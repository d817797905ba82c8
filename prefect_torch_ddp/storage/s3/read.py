"""Reading many objects from S3: each by a lean GET, or by botocore if that isn't enough."""

import hashlib
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlsplit

from prefect_torch_ddp.errors import BadAnswerError, OtherObjectError, StorageError
from prefect_torch_ddp.storage.protocol import CHANGED, Contents, ObjectPart
from prefect_torch_ddp.storage.s3.client import (
    PerProcess,
    S3Location,
    Settings,
    aws_settings,
    session_of,
)
from prefect_torch_ddp.storage.s3.get import Connections, GetSigner, request_of
from prefect_torch_ddp.storage.s3.retries import ask

NUM_THREADS = 32
"""At most: they hide 20 ms a request from two loader processes."""
MAX_LEAN_BYTES = 8 * 2**20
"""A bigger object's own transfer takes longer than what botocore adds."""
NUM_MISSES, REST_S = 8, 60.0
"""After so many misses in a row there are no lean GETs for so long."""


def quoted(name: str) -> str:
    """Quote a name as botocore does: what is signed and what is sent have to be the same."""
    return quote(name, safe="/~-._")


class Target(NamedTuple):
    """Where a bucket's objects are: plain values without a secret, so it may cross a fork."""

    url: str
    """Of the bucket, ends with a slash."""
    region: str
    """That requests are signed for."""


_TARGETS: dict[S3Location, tuple[Settings, Target]] = {}
"""With the settings it was found by; a forked child uses what its parent found."""


class S3Reader:
    """Reads objects at one location for one process; threads may share it.

    The first object is read by botocore, which knows endpoint rules, profiles and redirects; lean
    GETs go where that one came from.
    """

    def __init__(self, location: S3Location) -> None:
        # Loaded here and not in a thread: a fork while a thread loads a module would leave it
        # half loaded in the child.
        import botocore.session  # noqa: F401, PLC0415 - loads when an object is touched

        self._location = location
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="ptd-read")
        self._num_misses = 0
        self._rests_until_s = 0.0
        self._learning = threading.Lock()
        settings, target = _TARGETS.get(location, (None, None))
        is_known = target is not None and settings == aws_settings()
        self._lean = _lean_get(location, target) if target and is_known else None

    def read_many(self, parts: Sequence[ObjectPart]) -> Contents:
        """See `Readable.read_many`."""
        if not parts and self._lean is None:
            # What the client reads from botocore's files is shared with forked processes.
            ask(self._location, "read", "", lambda _client: None)
        is_first = self._lean is None
        begun = [self._by_botocore(part) for part in parts[:1] if is_first]
        values = [*begun, *self._pool.map(self._by_lean_get, parts[len(begun) :])]
        missed = [index for index, value in enumerate(values) if value is None]
        # The first in the caller's thread, where botocore loads what it needs.
        num_here = 0 if begun else 1
        again = [self._by_botocore(parts[index]) for index in missed[:num_here]]
        again += self._pool.map(self._by_botocore, [parts[index] for index in missed[num_here:]])
        for index, value in zip(missed, again, strict=True):
            values[index] = value
        return cast("Contents", values)

    def _by_lean_get(self, part: ObjectPart) -> bytes | None:
        """Return the content; None where botocore is to be asked."""
        is_small = 0 < part.num_bytes <= MAX_LEAN_BYTES
        if self._lean is None or not is_small or time.monotonic() < self._rests_until_s:
            return None
        content = self._lean.get(self._location.name_of(part.key), part)
        self._num_misses = 0 if content is not None else self._num_misses + 1
        if self._num_misses >= NUM_MISSES:
            self._num_misses, self._rests_until_s = 0, time.monotonic() + REST_S
        return content

    def _by_botocore(self, part: ObjectPart) -> bytes | StorageError:
        if part.num_bytes == 0 and part.start is not None:
            return b""  # there is no such range
        name = self._location.name_of(part.key)
        get = partial(self._get_object, name, part)
        try:
            return ask(self._location, "read", name, get, is_one_of_many=True)
        except StorageError as error:
            return error

    def _get_object(self, name: str, part: ObjectPart, client: Any) -> bytes:
        options = {}
        if part.etag is not None:
            options["IfMatch"] = f'"{part.etag}"'
        if part.start is not None:
            options["Range"] = _range_of(part)
        answer = client.get_object(Bucket=self._location.bucket, Key=name, **options)
        with answer["Body"] as body:
            content: bytes = body.read()
        found = answer["ResponseMetadata"]
        check_content(part, found["HTTPStatusCode"], found["HTTPHeaders"], content)
        target = target_of(name, *found["Route"], is_signed=not self._location.anonymous)
        with self._learning:
            if target is not None and (self._lean is None or self._lean.target != target):
                _TARGETS[self._location] = aws_settings(), target
                self._lean = _lean_get(self._location, target)
        return content


def target_of(name: str, url: str, signing: Mapping[str, Any], *, is_signed: bool) -> Target | None:
    """Return where a bucket's objects are; None if no lean GET can go.

    Args:
        name: of an object that was read.
        url: that it came from.
        signing: how botocore signed the request.
        is_signed: whether requests are.
    """
    from botocore.utils import get_environ_proxies  # noqa: PLC0415 - loaded by now

    plain, tail = url.partition("?")[0], "/" + quoted(name)
    is_usual = signing.get("signing_name") == "s3" and signing.get("auth_type") != "v4a"
    region = str(signing.get("region") or "")
    if not plain.endswith(tail) or (is_signed and not (is_usual and region)):
        return None
    if get_environ_proxies(plain):
        return None
    return Target(plain.removesuffix(tail) + "/", region)


class _LeanGet:
    def __init__(self, location: S3Location, target: Target) -> None:
        from botocore.httpsession import get_cert_path  # noqa: PLC0415 - loaded by now

        session, verify = session_of(location), location.verify
        if verify is None:
            verify = session.get_config_variable("ca_bundle") or True
        credentials = None if location.anonymous else session.get_credentials()
        timeouts_s = location.connect_timeout_s, location.read_timeout_s
        self.target = target
        self._path = urlsplit(target.url).path
        self._signer = GetSigner(target.url, target.region, credentials)
        self._connections = Connections(target.url, get_cert_path(verify), *timeouts_s)

    def get(self, name: str, part: ObjectPart) -> bytes | None:
        path = self._path + quoted(name)
        with suppress(Exception):  # whatever it is: botocore tries again, and explains
            headers = self._signer.headers(path)
            if part.etag is not None:
                headers["if-match"] = f'"{part.etag}"'
            if part.start is not None:
                headers["range"] = _range_of(part)
            request = request_of(path, headers)
            answer = self._connections.get(request, part.num_bytes) if request else None
            if answer is not None:
                check_content(part, *answer)
                return answer.body
        return None


def _lean_get(location: S3Location, target: Target) -> _LeanGet | None:
    with suppress(Exception):  # credentials or certificates can't be had: botocore explains
        return _LeanGet(location, target)
    return None


def _range_of(part: ObjectPart) -> str:
    assert part.start is not None
    return f"bytes={part.start}-{part.start + part.num_bytes - 1}"


def check_content(part: ObjectPart, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Compare what came with what was listed: range, ETag, length, and MD5 where the ETag is one.

    Args:
        part: what was asked for.
        status: of the answer.
        headers: by names in lower case.
        body: all of it.

    Raises:
        BadAnswerError: it isn't that.
    """
    given = re.match(r"bytes (\d{1,18})-", headers.get("content-range", ""))
    is_part = status == HTTPStatus.PARTIAL_CONTENT and (not given or int(given[1]) == part.start)
    if part.start is not None and not is_part:
        came = f"a part from byte {given[1]}" if given else "the whole object"
        msg = f"{came} came, not a part from byte {part.start}"
        raise BadAnswerError(msg)
    etag = headers.get("etag", "").removeprefix("W/").strip('"')
    if part.etag is not None and etag and etag != part.etag:
        msg = f"the object {CHANGED} (its ETag is {etag} now)"
        raise OtherObjectError(msg)
    if len(body) != part.num_bytes:
        msg = f"{len(body)} bytes came, not {part.num_bytes}"
        if part.etag is None or "content-length" not in headers:
            msg += f": the object {CHANGED}"
            raise OtherObjectError(msg)
        raise BadAnswerError(msg)
    if part.start is None and _is_md5(etag, headers):
        digest = hashlib.md5(body, usedforsecurity=False).hexdigest()
        if digest != etag:
            msg = f"the content's MD5 isn't its ETag {etag}"
            raise BadAnswerError(msg)


def _is_md5(etag: str, headers: Mapping[str, str]) -> bool:
    """Return whether an ETag is the content's MD5.

    It isn't of an upload in parts, nor of content under a key of KMS or the caller:
    https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
    """
    if not re.fullmatch("[0-9a-f]{32}", etag):
        return False
    is_by_kms = "kms" in headers.get("x-amz-server-side-encryption", "")
    return not is_by_kms and "x-amz-server-side-encryption-customer-algorithm" not in headers


reader_of = PerProcess(S3Reader).of
"""Return this process's reader of a location; threads may share it."""
