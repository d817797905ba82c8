"""Persistent connections to a host; they read one kind of answer only, a plain success."""

import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

IDLE_S = 5.0
"""One that was kept longer isn't used again: servers close those that are idle."""
MAX_AT_ONCE = 2**18
_HEAD = re.compile(rb"HTTP/1\.1 (200|206) [^\r\n]*\r\n((?:[!-9;-~]+:[^\r\n]*\r\n)*)\r\n")
_HEADER = re.compile(rb"([^:]+):[ \t]*([^\r\n]*?)[ \t]*\r\n")


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
        """Send a GET; return its answer where that is a plain good one of so many bytes.

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
    stands for all that is out of the ordinary, in status, length or form; the connection is of no
    more use then.
    """
    data = sock.recv(MAX_AT_ONCE)
    end = data.find(b"\r\n\r\n") + 4
    match = _HEAD.fullmatch(data[:end])
    if match is None:
        return None
    found = _HEADER.findall(match[2])
    headers = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in found}
    is_plain = len(headers) == len(found) and "transfer-encoding" not in headers
    if not is_plain or headers.get("content-length") != str(num_bytes):
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
