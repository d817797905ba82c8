"""Retries of S3 requests: each is repeated while its error may pass, within limits."""

import random
import time
from collections.abc import Callable
from http import HTTPStatus
from itertools import count
from operator import methodcaller
from typing import Any, TypeVar

from prefect_torch_ddp.errors import BadAnswerError
from prefect_torch_ddp.storage.s3.client import S3Location, client_of
from prefect_torch_ddp.storage.s3.errors import explained

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
