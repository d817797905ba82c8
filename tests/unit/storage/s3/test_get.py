"""Answers over a real socket, in pieces: read as http.client reads them, or not at all."""

import http.client
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.storage.s3.get import Answer, read_answer, request_of

NUM_BYTES = 5


@contextmanager
def _sent(data: bytes, cuts: Sequence[int] = (), *, stays_open: bool) -> Iterator[socket.socket]:
    """Give the end of a connection on which an answer comes in pieces."""
    ours, theirs = socket.socketpair()
    ours.settimeout(60)

    def serve() -> None:
        with suppress(OSError):  # a client that has its answer may have left
            for start, end in pairwise([0, *sorted(cuts), len(data)]):
                theirs.sendall(data[start:end])
            if not stays_open:
                theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join()
        theirs.close()


def _by_http_client(data: bytes) -> tuple[int, dict[str, str], bytes] | None:
    with _sent(data, stays_open=False) as sock:
        response = http.client.HTTPResponse(sock, method="GET")
        try:
            response.begin()
            headers = {
                name.lower(): (response.getheader(name) or "").strip() for name in response.headers
            }
            return response.status, headers, response.read()
        except http.client.HTTPException:
            return None
        finally:
            response.close()


def _by_us(data: bytes, cuts: Sequence[int] = (), *, stays_open: bool = False) -> Answer | None:
    with _sent(data, cuts, stays_open=stays_open) as sock:
        return read_answer(sock, NUM_BYTES)


def _head(status: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status, *headers]
    return b"".join(line + b"\r\n" for line in lines) + b"\r\n"


LENGTH = b"Content-Length: 5"
CHUNKED = b"Transfer-Encoding: chunked"
PLAIN = {
    "as S3 sends it": _head(b"200 OK", b'ETag: "abc"', LENGTH, b"Connection: keep-alive"),
    "a part": _head(b"206 Partial Content", b"content-length:5", b"X-Odd:\t v "),
    "the last one": _head(b"200 OK", LENGTH, b"Connection: close"),
}
OTHERS = {
    "an error": _head(b"503 Slow Down", LENGTH) + b"<x/>>",
    "another length": _head(b"200 OK", b"Content-Length: 6") + b"123456",
    "more than was announced": _head(b"200 OK", LENGTH) + b"12345HTTP/1.1 200 OK\r\n",
    "in chunks": _head(b"200 OK", CHUNKED) + b"3\r\n123\r\n2\r\n45\r\n0\r\n\r\n",
    "in chunks, with a length": _head(b"200 OK", LENGTH, CHUNKED) + b"5\r\n12345\r\n0\r\n\r\n",
    "of no length": _head(b"200 OK") + b"12345",
    "after a wait": _head(b"100 Continue") + _head(b"200 OK", LENGTH) + b"12345",
    "old": b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n12345",
    "without a reason": _head(b"200", LENGTH) + b"12345",
    "two lengths": _head(b"200 OK", LENGTH, LENGTH) + b"12345",
    "a folded line": _head(b"200 OK", b"X-Long: a", b" b", LENGTH) + b"12345",
    "cut in its head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "cut in its body": _head(b"200 OK", LENGTH) + b"123",
    "a length with a sign": _head(b"200 OK", b"Content-Length: +5") + b"12345",
    "silence": b"",
}


@pytest.mark.parametrize("head", PLAIN.values(), ids=PLAIN)
def test_the_plain_answer_is_read_as_http_client_reads_it(head: bytes) -> None:
    """Wherever its body is cut; where its head is, it may be left to botocore."""
    data, chance = head + b"12345", random.Random(0)
    expected = _by_http_client(data)
    for num_cuts in (0, 1, 3, 50):
        cuts = [chance.randrange(len(data) + 1) for _ in range(num_cuts)]
        assert _by_us(data, cuts) in (expected, None), cuts
        within = [max(cut, len(head)) for cut in cuts]
        assert _by_us(data, within) == expected, within


@pytest.mark.parametrize("stays_open", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_any_other_is_left_to_botocore(name: str, stays_open: bool) -> None:
    """At once, where enough of it has come to tell."""
    ends_early = name in {"silence", "cut in its body"}
    assert _by_us(OTHERS[name], stays_open=stays_open and not ends_early) is None


NAMES = [b"ETag", b"etag", b"Content-Length", b"Connection", b"Transfer-Encoding", b"bad name"]
VALUES = [b"5", b"0", b"chunked", b"close", b"keep-alive", b'"abc"', b"", b"\xe9", b"5, 5", b"+5"]
STATUSES = [b"200 OK", b"206 Partial Content", b"304 Not Modified", b"404 Not Found"]


@settings(max_examples=150, deadline=None)
@given(
    headers=st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)).map(b": ".join), max_size=5
    ),
    body=st.sampled_from([b"", b"12345", b"5\r\n12345\r\n0\r\n\r\n"]),
    status=st.sampled_from(STATUSES),
)
def test_any_head_is_read_as_http_client_reads_it(
    headers: list[bytes], body: bytes, status: bytes
) -> None:
    """Also one that contradicts itself, where it is read at all."""
    data = _head(status, *headers) + body
    found = _by_us(data)
    assert found is None or found == _by_http_client(data)


def test_silence_in_mid_body_is_a_timeout() -> None:
    """After as long as the socket waits."""
    with _sent(OTHERS["cut in its body"], stays_open=True) as sock:
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            read_answer(sock, NUM_BYTES)


def test_no_line_of_a_request_ends_early() -> None:
    """A listed ETag, or a token, with a line break in it sends no header of its own."""
    expected = b"GET /b/k HTTP/1.1\r\nhost: h\r\naccept-encoding: identity\r\n\r\n"
    assert request_of("/b/k", {"host": "h"}) == expected
    for value in ('"a"\r\nX-Evil: 1', '"a"\n', "a\r", '"\u03b1"'):
        assert request_of("/b/k", {"host": "h", "if-match": value}) is None
