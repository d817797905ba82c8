"""Owns a GET on an open connection: sent in one piece, its answer taken in as it is usually
sent, by http.client otherwise.
"""

import http.client
import io
import re
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast

_AT_ONCE = 1 << 16
_LONGEST_LENGTH = 18
"""Digits."""
_HEAD = re.compile(rb"HTTP/1\.1 (200|206) [^\r\n]*\r\n((?:[!-9;-~]+:[^\r\n]*\r\n)*)\r\n")
_HEADER = re.compile(rb"([^:]+):[ \t]*([^\r\n]*?)[ \t]*\r\n")


class Answer(NamedTuple):
    """What came."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes
    has_length: bool
    """Whether its head told how long the body is."""
    will_close: bool
    """Whether the connection is of no more use."""


def request_of(target: str, headers: Mapping[str, str]) -> bytes:
    """Return a GET as it is sent.

    Raises:
        ValueError: something in it would end a line, or can't be sent.
    """
    lines = [
        f"GET {target} HTTP/1.1",
        *(f"{name}: {value}" for name, value in headers.items()),
        "Accept-Encoding: identity",
    ]
    text = "\r\n".join(lines)
    if text.count("\n") == text.count("\r") == len(lines) - 1:
        with suppress(UnicodeEncodeError):  # which would hold the text, with what was signed
            return f"{text}\r\n\r\n".encode("latin-1")
    msg = "the listed ETag or the credentials hold a line break, or a character that can't be in a header"
    raise ValueError(msg)


def ask(sock: socket.socket, request: bytes) -> Answer:
    """Send a request and read the answer whole.

    http.client reads any answer, and takes some 50 µs to take apart the head of one. An answer
    whose head comes in one piece and is as S3 sends it is read here; what is out of the
    ordinary, in status, length or form, is http.client's.

    Raises:
        OSError: the connection broke, or was silent for as long as its timeout says.
        http.client.HTTPException: it ended early, or what came is no answer.
    """
    sock.sendall(request)
    data = sock.recv(_AT_ONCE)
    if not data:
        msg = "the connection was closed without an answer"
        raise http.client.RemoteDisconnected(msg)
    end = data.find(b"\r\n\r\n") + 4
    headers = _usual(data[:end])
    if headers is None:
        return _unusual(sock, data)
    status, length = int(data[9:12]), int(headers["content-length"])
    body = data[end : end + length]
    if len(body) < length:  # into one buffer of its size
        body = io.BufferedReader(_Begun(sock, body, length)).read(length)
        if len(body) < length:
            raise http.client.IncompleteRead(body, length - len(body))
    # More than was announced belongs to nothing that was asked for: the next answer would be
    # taken for another one's.
    will_close = (
        len(data) > end + length or headers.get("connection", "keep-alive").lower() != "keep-alive"
    )
    return Answer(status, headers, body, has_length=True, will_close=will_close)


def _usual(head: bytes) -> dict[str, str] | None:
    """Return the headers of an answer with a body of a known length; None where there may be
    more to it.
    """
    match = _HEAD.fullmatch(head)
    if match is None:
        return None
    found = [
        (name.lower().decode("latin-1"), value.decode("latin-1"))
        for name, value in _HEADER.findall(match[2])
    ]
    headers = dict(found)
    length = headers.get("content-length", "")
    is_number = length.isascii() and length.isdecimal() and len(length) <= _LONGEST_LENGTH
    return (
        headers
        if is_number and len(headers) == len(found) and "transfer-encoding" not in headers
        else None
    )


def _unusual(sock: socket.socket, data: bytes) -> Answer:
    response = http.client.HTTPResponse(cast("Any", _Begun(sock, data)), method="GET")
    try:
        response.begin()
        body = response.read()
        headers = {name.lower(): response.getheader(name) or "" for name in response.headers}
        return Answer(
            response.status, headers, body, response.length is not None, response.will_close
        )
    finally:
        response.close()


class _Begun(io.RawIOBase):
    """A connection of which some bytes were read already, as http.client wants one."""

    def __init__(self, sock: socket.socket, data: bytes, length: int | None = None) -> None:
        """Go on where the bytes end; up to a length from where they begin, so that a buffer
        takes none of what follows.
        """
        self._sock = sock
        self._data = memoryview(data)
        self._left = sys.maxsize if length is None else length

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: self._left]
        if self._data:
            num = min(len(self._data), len(room))
            room[:num], self._data = self._data[:num], self._data[num:]
        else:
            num = self._sock.recv_into(room) if room else 0
        self._left -= num
        return num
