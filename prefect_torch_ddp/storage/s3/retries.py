"""Retries of S3 requests: each is repeated while its error may pass, within limits.

Texts say what an error means and what to do, without any secret.
"""

import random
import time
from collections.abc import Callable
from http import HTTPStatus
from itertools import count
from operator import methodcaller
from typing import TYPE_CHECKING, Any, TypeVar

from prefect_torch_ddp.errors import (
    BadAnswerError,
    DamagedObjectError,
    ObjectChangedError,
    ObjectNotFoundError,
    OtherObjectError,
    StorageError,
)
from prefect_torch_ddp.storage.protocol import CHANGED
from prefect_torch_ddp.storage.s3.client import S3Location, client_of

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

T = TypeVar("T")

PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
SHORT_PAUSE_S = 0.05
"""Of one of many small reads side by side: a batch waits for its last one."""

_CHANCE = random.SystemRandom()
"""Not the module's own generator: a broken connection must not change what a training draws."""

_LASTING_STATUSES = {HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.INSUFFICIENT_STORAGE}
_PASSING_STATUSES = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS}
# With the status of a bad request: the store was busy, or got something else than was sent.
_PASSING_CODES = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException"}
_PASSING_CODES |= {"RequestLimitExceeded", "BandwidthLimitExceeded"}
_PASSING_CODES |= {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"}
_ABSENT = {"NoSuchKey", "NoSuchBucket", "NoSuchUpload", "NoSuchVersion"}
# By name, since botocore and urllib3 load when an object is touched.
_PASSING_CLASSES = {"ConnectionError", "HTTPClientError", "IncompleteReadError", "HTTPError"}
_PASSING_CLASSES |= {"FlexibleChecksumError", "CredentialRetrievalError", "ResponseParserError"}
# Of a TLS error: the other end won't be another one the next time.
_LASTING_WORDS = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")

_KEYS = (
    "check the access key, the secret and the session token in the block, "
    "or in the worker's environment"
)
_REGION = "give the bucket's region, in the block or as AWS_DEFAULT_REGION"
_REACH = "check the endpoint URL, the network, and that the server is up"
_TORN = f"the content broke off: {_REACH}"
_BUSY = "the store is overloaded or down: try again later, or with fewer ranks"
_FULL = "the store is full: free space there, or ask for a higher quota"
_DENIED = (
    "access denied: the credentials need the rights GetObject, PutObject, DeleteObject and "
    "AbortMultipartUpload on the objects, and ListBucket and ListBucketMultipartUploads on the "
    "bucket"
)

_BY_CODE = {
    "NoSuchBucket": "there is no such bucket: create it, or correct its name",
    "AccessDenied": _DENIED,
    "Forbidden": _DENIED,
    "InvalidAccessKeyId": f"the store doesn't know this access key: {_KEYS}",
    "SignatureDoesNotMatch": f"the secret is wrong: {_KEYS}",
    "InvalidToken": f"the session token is wrong: {_KEYS}",
    "ExpiredToken": (
        "the session token has expired: give a fresh one (in the block, or where the Dask workers "
        "run, in ~/.aws/credentials), or use a role that renews it"
    ),
    "RequestTimeTooSkewed": (
        "this machine's clock differs too much from the store's: set it, for instance by NTP"
    ),
    "AuthorizationHeaderMalformed": f"the request was signed for another region: {_REGION}",
    "PermanentRedirect": f"the bucket is in another region: {_REGION}",
    "SlowDown": _BUSY,
    "NotImplemented": "the store can't do that: use one that honours conditional writes",
    "QuotaExceeded": _FULL,
}

_BY_STATUS = {401: f"access denied: {_KEYS}", 403: _DENIED, 429: _BUSY, 507: _FULL}

_BY_CLASS = {
    "NoCredentialsError": (
        "there are no credentials: register an s3-bucket block with some, or set "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where the Dask workers run"
    ),
    "CredentialRetrievalError": f"the credentials can't be fetched: {_KEYS}",
    "ProfileNotFound": (
        "this machine has no such AWS profile: add it to ~/.aws, or use a block with credentials"
    ),
    "EndpointConnectionError": f"the endpoint can't be reached: {_REACH}",
    "ConnectTimeoutError": f"the endpoint doesn't answer: {_REACH}",
    "ConnectionClosedError": (
        f"the endpoint closed the connection, each time: {_REACH}; if it has TLS, write https://"
    ),
    "ReadTimeoutError": (
        f"the endpoint didn't answer in time: {_REACH}; "
        "some stores are silent, too, when they are full"
    ),
    "ProxyConnectionError": "the proxy can't be reached: check HTTP_PROXY and HTTPS_PROXY",
    "ResponseStreamingError": _TORN,
    "IncompleteReadError": _TORN,
    "HTTPError": _TORN,
    "ResponseParserError": (
        "the answer isn't S3's: check the endpoint URL (https:// where it has TLS), "
        "and what stands between"
    ),
    "HTTPClientError": (
        "the request couldn't be sent: look for spaces and line breaks in the endpoint URL and "
        "the credentials"
    ),
    "SSLError": (
        "the endpoint's certificate isn't trusted: name its CA bundle (in a block "
        "verify_cert_path, with verify on; else AWS_CA_BUNDLE), or write http:// if it has no TLS"
    ),
}


def ask(
    location: S3Location,
    verb: str,
    name: str,
    call: Callable[[Any], T],
    *,
    is_one_of_many: bool = False,
) -> T:
    """Give `call` the client, again where its error may pass.

    Args:
        location: whose client, and whose limits.
        verb: what is tried, for the error's text, for instance "read".
        name: of the object, whole.
        call: makes one request, and reads its answer whole.
        is_one_of_many: whether pauses are short.

    Raises:
        StorageError: made of the last error.
    """
    began_s, pause_s = time.monotonic(), SHORT_PAUSE_S if is_one_of_many else PAUSE_S
    for attempt in count(1):
        try:
            return call(client_of(location))
        except Exception as error:
            spent_s = time.monotonic() - began_s
            is_last = attempt >= location.max_attempts or spent_s >= location.give_up_after_s
            if is_last or not may_pass(error):
                tries = f"; tried {attempt} times in {spent_s:.0f} s" if attempt > 1 else ""
                final = explained(verb, location.where(name), error, tries)
                if final is error:
                    raise
                raise final from error
        # At random, so that ranks that failed together don't come back together; never at once,
        # which keeps a busy store busy.
        time.sleep(min(LONGEST_PAUSE_S, pause_s * 2**attempt) * _CHANCE.uniform(0.5, 1))
    raise AssertionError


def request(location: S3Location, verb: str, name: str, method: str, **arguments: Any) -> Any:
    """Ask by a method of the client; bucket and key are added to its arguments."""
    where = {"Bucket": location.bucket, "Key": name}
    return ask(location, verb, name, methodcaller(method, **where, **arguments))


def may_pass(error: Exception) -> bool:
    """Return whether the same request may go well the next time."""
    response = getattr(error, "response", None)
    if isinstance(response, dict) and "Error" in response:  # botocore's ClientError
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        is_servers = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status not in _LASTING_STATUSES
        code = response["Error"].get("Code")
        is_passing = status in _PASSING_STATUSES or code in _PASSING_CODES
        # Another code comes of a damaged answer: it may have said that there is no object, which
        # is no error. HEAD's has no body.
        is_head = str(getattr(error, "operation_name", "")).startswith("Head")
        is_damaged = status == HTTPStatus.NOT_FOUND and code not in _ABSENT and not is_head
        return is_servers or is_passing or is_damaged
    if any(word in str(error) for word in _LASTING_WORDS):
        return False
    names = {base.__name__ for base in type(error).__mro__}
    return isinstance(error, OSError | BadAnswerError) or bool(names & _PASSING_CLASSES)


def explained(verb: str, where: str, error: Exception, tries: str) -> Exception:
    """Make the StorageError that says what is wrong and what to do.

    Args:
        verb: what was tried, for instance "read".
        where: bucket, key and endpoint: "s3://bucket/key at http://host:9000".
        error: botocore's or urllib3's, or a BadAnswerError; another one is returned as it is.
        tries: "; tried 3 times in 2 s", or nothing.
    """
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - loaded by now
    from botocore.parsers import ResponseParserError  # noqa: PLC0415
    from urllib3.exceptions import HTTPError  # noqa: PLC0415

    if isinstance(error, ClientError):
        return _refused(verb, where, error, tries)
    if isinstance(error, OtherObjectError):
        return ObjectChangedError(f"can't {verb} {where}: {error}")
    if isinstance(error, BadAnswerError):
        way_out = "look for what changes it on its way (a proxy), or for a disk that fails there"
        return DamagedObjectError(f"can't {verb} {where}: {error}{tries}; {way_out}")
    if isinstance(error, BotoCoreError | ResponseParserError | HTTPError | OSError):
        known = (_BY_CLASS.get(base.__name__) for base in type(error).__mro__)
        way_out = next(filter(None, known), str(error))
        return StorageError(f"can't {verb} {where}: {way_out} ({type(error).__name__}{tries})")
    return error


def _refused(verb: str, where: str, error: "ClientError", tries: str) -> StorageError:
    answer = error.response.get("Error", {})
    code = str(answer.get("Code", "")) or "no code"
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "NoSuchKey":
        return ObjectNotFoundError(f"can't {verb} {where}: there is no such object")
    if status == HTTPStatus.PRECONDITION_FAILED and verb == "read":
        return ObjectChangedError(f"can't {verb} {where}: the object {CHANGED}")
    is_servers = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    unknown = _BUSY if is_servers else "look the code up in the store's manual"
    way_out = _BY_CODE.get(code) or _BY_STATUS.get(status, unknown)
    if way_out.endswith(_REGION) and (region := answer.get("Region")):
        way_out += f": {region}"
    return StorageError(f"can't {verb} {where}: {way_out} ({code}, status {status}{tries})")
