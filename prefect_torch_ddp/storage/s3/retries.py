"""Owns how often a request to S3 is made: what may pass is tried again, after a pause by
chance, within limits.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import TypeVar

T = TypeVar("T")

PAUSE_S, LONGEST_PAUSE_S = 0.25, 10.0
SHORT_PAUSE_S = 0.05
"""Of one of many small reads side by side: a batch waits for its last one, and one that breaks
off says little of the store."""

_CHANCE = random.SystemRandom()
"""Not the module's own generator: that one is the training's, whose draws a broken connection
must not change."""

_LASTING_STATUSES = {HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.INSUFFICIENT_STORAGE}
_PASSING_STATUSES = {HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS}
# Refusals whose status is that of a bad request: the store was busy, or what it got isn't what
# was sent.
_PASSING_CODES = {
    *(
        "SlowDown",
        "RequestTimeout",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
    ),
    *("BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch"),
}
# By name, since botocore loads when an object is touched.
_PASSING_CLASSES = {
    *(
        "ConnectionError",
        "HTTPClientError",
        "IncompleteReadError",
        "FlexibleChecksumError",
        "CredentialRetrievalError",
    ),
    *("ResponseParserError", "HTTPError"),
}
_LASTING_WORDS = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
"""Of a TLS error: whom we talk to won't be another one the next time."""


class DamagedError(Exception):
    """What came isn't what was sent."""


@dataclass(frozen=True)
class Tries:
    """How often something was tried, and for how long."""

    num: int
    seconds: float

    def __str__(self) -> str:
        """Say it, for the end of an error's text."""
        return "" if self.num == 1 else f"; tried {self.num} times in {self.seconds:.0f} s"


ONCE = Tries(1, 0.0)


def in_attempts(
    ask: Callable[[], T],
    max_attempts: int,
    give_up_after_s: float,
    explain: Callable[[Exception, Tries], Exception],
    *,
    is_one_of_many: bool = False,
) -> T:
    """Return what `ask` returns, asked again where its error may pass.

    Args:
        ask: makes one request, and reads its answer whole.
        max_attempts: how often at most.
        give_up_after_s: no attempt begins later than that.
        explain: makes the error that is raised at last.
        is_one_of_many: whether pauses are short.
    """
    began_s, pause_s = time.monotonic(), SHORT_PAUSE_S if is_one_of_many else PAUSE_S
    for attempt in count(1):
        try:
            return ask()
        except Exception as error:
            tries = Tries(attempt, time.monotonic() - began_s)
            if attempt >= max_attempts or tries.seconds >= give_up_after_s or not may_pass(error):
                final = explain(error, tries)
                if final is error:
                    raise
                raise final from error
        # By chance, so that ranks that failed together don't come back together; never at once,
        # which keeps a busy store busy.
        time.sleep(min(LONGEST_PAUSE_S, pause_s * 2**attempt) * _CHANCE.uniform(0.5, 1))
    raise AssertionError


def may_pass(error: Exception) -> bool:
    """Tell whether the same request may go well the next time."""
    response = getattr(error, "response", None)
    if isinstance(response, dict) and "Error" in response:  # botocore's ClientError
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        is_servers = status >= HTTPStatus.INTERNAL_SERVER_ERROR and status not in _LASTING_STATUSES
        return (
            is_servers
            or status in _PASSING_STATUSES
            or response["Error"].get("Code") in _PASSING_CODES
        )
    if any(word in str(error) for word in _LASTING_WORDS):
        return False
    return isinstance(error, OSError | DamagedError) or any(
        base.__name__ in _PASSING_CLASSES for base in type(error).__mro__
    )
