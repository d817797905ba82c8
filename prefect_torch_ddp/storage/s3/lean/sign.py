"""Signing a GET: AWS Signature Version 4, with the day's key computed once."""

import hashlib
import hmac
import time
from typing import Any
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}
_NO_BODY = hashlib.sha256(b"").hexdigest()


class GetSigner:
    """Makes the headers of a GET, signed where there are credentials.

    botocore's signer makes the same (`test_sign.py` compares them), in some 80 µs more: it derives
    the day's key, and takes apart and sorts the headers, each time. See
    https://docs.aws.amazon.com/IAM/latest/UserGuide/create-signed-request.html
    """

    def __init__(self, url: str, region: str, credentials: Any) -> None:
        """Keep what it takes.

        Args:
            url: of the bucket, or of anything at its host.
            region: of the bucket.
            credentials: botocore's, which may renew themselves; None: requests aren't signed.
        """
        parts = urlsplit(url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else f"{parts.hostname}"
        is_default = parts.port in {None, _DEFAULT_PORTS.get(parts.scheme)}
        self._host = host if is_default else f"{host}:{parts.port}"
        self._region = region
        self._credentials = credentials
        # Copied for each signature: unlike hmac.digest that keeps the interpreter, for which a
        # thread would have to queue again.
        self._known: tuple[Any, str, hmac.HMAC] = (None, "", hmac.new(b"", digestmod="sha256"))

    def headers(self, path: str, at_s: float | None = None) -> dict[str, str]:
        """Return the headers that a GET of a path needs.

        Args:
            path: of the URL, quoted; no query follows it.
            at_s: Unix seconds; None: now.
        """
        if self._credentials is None:
            return {"host": self._host}
        frozen = self._credentials.get_frozen_credentials()  # each time: they may be renewed
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at_s))
        scope = f"{moment[:8]}/{self._region}/s3/aws4_request"
        headers = {"host": self._host, "x-amz-content-sha256": _NO_BODY, "x-amz-date": moment}
        if frozen.token:
            headers["x-amz-security-token"] = frozen.token
        names = ";".join(headers)  # in the order of the alphabet, as they stand above
        lines = "".join(f"{name}:{' '.join(value.split())}\n" for name, value in headers.items())
        request = f"GET\n{path}\n\n{lines}\n{names}\n{_NO_BODY}"
        digest = hashlib.sha256(request.encode()).hexdigest()
        keyed = self._keyed(frozen, moment[:8]).copy()
        keyed.update(f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}".encode())
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={frozen.access_key}/{scope}, "
            f"SignedHeaders={names}, Signature={keyed.hexdigest()}"
        )
        return headers

    def _keyed(self, frozen: Any, day: str) -> hmac.HMAC:
        known, its_day, keyed = self._known  # at once: other threads may set it
        if known != frozen or its_day != day:
            key = f"AWS4{frozen.secret_key}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            keyed = hmac.new(key, digestmod="sha256")
            self._known = frozen, day, keyed
        return keyed
