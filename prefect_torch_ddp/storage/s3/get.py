"""A lean GET: signed as botocore signs it, sent on a kept connection, its plain success read."""

import hashlib
import hmac
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

IDLE_S = 5.0
"""One that was kept longer isn't used again: servers close those that are idle."""
MAX_AT_ONCE = 2**18
_HEAD = re.compile(rb"HTTP/1\.1 (200|206) [^\r\n]*\r\n((?:[!-9;-~]+:[^\r\n]*\r\n)*)\r\n")
_HEADER = re.compile(rb"([^:]+):[ \t]*([^\r\n]*?)[ \t]*\r\n")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NO_BODY = hashlib.sha256(b"").hexdigest()


class GetSigner:
    """Makes the headers of a GET, signed if there are credentials.

    botocore's signer makes the same (`test_get.py` compares them), in some 80 µs more: it derives
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


class Answer(NamedTuple):
    """A plain success."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes


class Connections:
    """Connections to one host, kept from GET to GET; threads share them."""

    def __init__(
        self, url: str, ca_bundle: str | None, connect_timeout_s: float, read_timeout_s: float
    ) -> None:
        """Connect to nothing yet; without a file of certificates to trust none are checked."""
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        self._address = parts.hostname or "", parts.port or (443 if is_tls else 80)
        self._tls = _tls_context(ca_bundle) if is_tls else None
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._idle: deque[tuple[socket.socket, float]] = deque()

    def get(self, request: bytes, num_bytes: int) -> Answer | None:
        """Send a GET; return its answer if that is a plain good one of so many bytes.

        Raises:
            OSError: the connection broke, or was silent for too long.
        """
        sock = self._take()
        try:
            sock.sendall(request)
            answer = read_answer(sock, num_bytes)
        except BaseException:
            sock.close()
            raise
        if answer and answer.headers.get("connection", "keep-alive").lower() == "keep-alive":
            self._idle.append((sock, time.monotonic()))
        else:
            sock.close()
        return answer

    def _take(self) -> socket.socket:
        with suppress(IndexError):
            while True:
                sock, since_s = self._idle.pop()
                if time.monotonic() - since_s < IDLE_S:
                    return sock
                sock.close()
        sock = socket.create_connection(self._address, self._connect_timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            sock = self._tls.wrap_socket(sock, server_hostname=self._address[0])
        sock.settimeout(self._read_timeout_s)
        return sock


def _tls_context(ca_bundle: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_bundle)
    if ca_bundle is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def request_of(path: str, headers: Mapping[str, str]) -> bytes | None:
    """Return a GET as it is sent; None where something in it would end a line or can't be sent."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    text = "\r\n".join([f"GET {path} HTTP/1.1", *lines, "accept-encoding: identity"])
    if not text.count("\n") == text.count("\r") == len(lines) + 1 or not text.isascii():
        return None
    return f"{text}\r\n\r\n".encode()


def read_answer(sock: socket.socket, num_bytes: int) -> Answer | None:
    """Read a plain good answer: its head comes in one piece, and its body has so many bytes.

    http.client reads any answer, and takes some 50 µs to take apart the head of one. Here None
    means that anything was out of the ordinary, in status, length or form; the connection is of
    no more use then.
    """
    data = sock.recv(MAX_AT_ONCE)
    end = data.find(b"\r\n\r\n") + 4
    match = _HEAD.fullmatch(data[:end])
    if match is None:
        return None
    found = _HEADER.findall(match[2])
    headers = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in found}
    is_unambiguous = len(headers) == len(found) and "transfer-encoding" not in headers
    if not is_unambiguous or headers.get("content-length") != str(num_bytes):
        return None
    parts, num_left = [data[end:]], num_bytes - (len(data) - end)
    while num_left > 0:
        parts.append(sock.recv(min(num_left, MAX_AT_ONCE)))
        num_left -= len(parts[-1])
        if not parts[-1]:
            return None
    # More than was announced belongs to nothing that was asked for: the next answer would be taken
    # for another one's.
    return None if num_left else Answer(int(match[1]), headers, b"".join(parts))
