"""Answers over a real socket, in pieces of any size: read as http.client reads them, and what
is broken is told in its words."""

import http.client
import random
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.storage.s3.lean.wire import Answer, ask, request_of

pytestmark = pytest.mark.timeout(60)
REQUEST = request_of("/b/k", {"Host": "h"})
ETAG = b'ETag: "abc"\r\n'


@contextmanager
def _sent(data: bytes, cuts: list[int], *, stays_open: bool) -> Iterator[socket.socket]:
    """Give the end of a connection on which an answer comes, in pieces, once a request has
    come."""
    ours, theirs = socket.socketpair()
    ours.settimeout(5)

    def serve() -> None:
        theirs.recv(65536)
        start = 0
        for end in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
            theirs.sendall(data[start:end])
            start = end
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


def _by_http_client(data: bytes) -> tuple[int, bytes, bool] | str:
    with _sent(data, [], stays_open=False) as sock:
        sock.sendall(REQUEST)
        response = http.client.HTTPResponse(sock, method="GET")
        try:
            response.begin()
            return response.status, response.read(), response.will_close
        except http.client.HTTPException as error:
            return type(error).__name__
        finally:
            response.close()


def _by_us(data: bytes, cuts: list[int]) -> tuple[int, bytes, bool] | str:
    with _sent(data, cuts, stays_open=False) as sock:
        try:
            answer = ask(sock, REQUEST)
        except http.client.HTTPException as error:
            return type(error).__name__
        return answer.status, answer.body, answer.will_close


def _head(status: bytes, *headers: bytes) -> bytes:
    return (
        b"HTTP/1.1 " + status + b"\r\n" + b"".join(header + b"\r\n" for header in headers) + b"\r\n"
    )


ANSWERS = {
    "as S3 sends it": _head(
        b"200 OK", b'ETag: "abc"', b"Content-Length: 5", b"Connection: keep-alive"
    )
    + b"12345",
    "a part": _head(b"206 Partial Content", b"content-length:5", b"X-Odd:\t v ") + b"12345",
    "nothing": _head(b"200 OK", b"Content-Length: 0"),
    "the last one": _head(b"200 OK", b"Content-Length: 5", b"Connection: close") + b"12345",
    "an error": _head(b"503 Slow Down", b"Content-Length: 4") + b"<x/>",
    "in chunks": _head(b"200 OK", b"Transfer-Encoding: chunked")
    + b"3\r\n123\r\n2\r\n45\r\n0\r\n\r\n",
    "in chunks, with a length": _head(
        b"200 OK", b"Content-Length: 9", b"Transfer-Encoding: chunked"
    )
    + b"2\r\n12\r\n0\r\n\r\n",
    "of no length": _head(b"200 OK") + b"12345",
    "after a wait": _head(b"100 Continue") + _head(b"200 OK", b"Content-Length: 5") + b"12345",
    "old": b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n12345",
    "without a reason": _head(b"200", b"Content-Length: 5") + b"12345",
    "two lengths": _head(b"200 OK", b"Content-Length: 5", b"Content-Length: 5") + b"12345",
    "a folded line": _head(b"200 OK", b"X-Long: a", b" b", b"Content-Length: 5") + b"12345",
    "cut in its head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "cut in its body": _head(b"200 OK", b"Content-Length: 5") + b"123",
    "cut in its chunks": _head(b"200 OK", b"Transfer-Encoding: chunked") + b"3\r\n12",
    "no answer at all": b"\x00\x01 what is this",
    "a negative length": _head(b"200 OK", b"Content-Length: -5") + b"12345",
    "a length of many digits": _head(b"200 OK", b"Content-Length: " + b"1" * 5000) + b"12345",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 5\n\n12345",
    "silence": b"",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_read_as_http_client_reads_it(name: str) -> None:
    """Whole, and in pieces that are cut anywhere."""
    data = ANSWERS[name]
    expected = _by_http_client(data)
    chance = random.Random(name)
    for num_cuts in (0, 1, 3, len(data)):
        cuts = [chance.randrange(len(data) + 1) for _ in range(num_cuts)]
        assert _by_us(data, cuts) == expected, cuts


@settings(max_examples=150, deadline=None)
@given(
    headers=st.lists(
        st.tuples(
            st.sampled_from(
                [
                    b"ETag",
                    b"etag",
                    b"Content-Length",
                    b"Connection",
                    b"Transfer-Encoding",
                    b"x-amz-meta-a",
                    b"bad name",
                ]
            ),
            st.sampled_from(
                [
                    b"5",
                    b"0",
                    b"chunked",
                    b"close",
                    b"keep-alive",
                    b'"abc"',
                    b"",
                    b"\xe9",
                    b"5, 5",
                    b"+5",
                ]
            ),
        ),
        max_size=5,
    ),
    body=st.sampled_from([b"", b"12345", b"5\r\n12345\r\n0\r\n\r\n"]),
    status=st.sampled_from(
        [b"200 OK", b"206 Partial Content", b"304 Not Modified", b"404 Not Found"]
    ),
)
def test_any_head_is_read_as_http_client_reads_it(
    headers: list[tuple[bytes, bytes]], body: bytes, status: bytes
) -> None:
    """Also one that contradicts itself; but a connection on which more came than was announced
    is of no more use."""
    data = _head(status, *(name + b": " + value for name, value in headers)) + body
    expected, found = _by_http_client(data), _by_us(data, [])
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
        return
    assert found[:2] == expected[:2]
    assert found[2] >= expected[2]


def test_a_connection_is_used_again() -> None:
    """The usual answer leaves it open, and its headers go by names in lower case."""
    data = ANSWERS["as S3 sends it"]
    with _sent(data, [], stays_open=True) as sock:
        answer = ask(sock, REQUEST)
    headers = {"etag": '"abc"', "content-length": "5", "connection": "keep-alive"}
    assert answer == Answer(200, headers, b"12345", has_length=True, will_close=False)


def test_more_than_was_announced_ends_the_connection() -> None:
    """It would be taken for the next request's answer."""
    with _sent(ANSWERS["as S3 sends it"] + b"HTTP/1.1 200 OK\r\n", [], stays_open=True) as sock:
        answer = ask(sock, REQUEST)
    assert (answer.body, answer.will_close) == (b"12345", True)


def test_silence_in_mid_body_is_a_timeout() -> None:
    """After as long as the socket waits."""
    with _sent(ANSWERS["cut in its body"], [], stays_open=True) as sock:
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            ask(sock, REQUEST)


@pytest.mark.parametrize(
    "data",
    [ANSWERS["bare line feeds"], b"SSH-2.0-OpenSSH_9.2\r\n"],
    ids=["bare line feeds", "no HTTP"],
)
def test_what_is_out_of_the_ordinary_is_told_at_once(data: bytes) -> None:
    """On a connection that stays open, too: nobody waits for the end of a head that has
    come."""
    with _sent(data, [], stays_open=True) as sock:
        if data.startswith(b"HTTP"):
            assert ask(sock, REQUEST).body == b"12345"
        else:
            with pytest.raises(http.client.BadStatusLine):
                ask(sock, REQUEST)


def test_a_large_body_is_in_memory_once() -> None:
    """It is read into a buffer of its size, without a byte of what follows."""
    num_bytes = 50_000_000
    data = _head(b"200 OK", b"Content-Length: %d" % num_bytes) + bytes(num_bytes)
    with _sent(data + b"next", [], stays_open=True) as sock:
        tracemalloc.start()
        try:
            answer = ask(sock, REQUEST)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert len(answer.body) == num_bytes
        assert sock.recv(4) == b"next"
    assert peak < 1.2 * num_bytes


@pytest.mark.parametrize("etag", ['"a"\r\nX-Evil: 1', '"\u03b1"'])
def test_no_line_of_a_request_ends_early(etag: str) -> None:
    """A listed ETag with a line break in it sends no header of its own, and the error holds
    nothing of what was signed."""
    with pytest.raises(
        ValueError, match="the listed ETag or the credentials hold a line break"
    ) as caught:
        request_of("/b/k", {"x-amz-security-token": "hunter2", "If-Match": etag})
    assert "hunter2" not in repr(caught.value)
    assert caught.value.__context__ is None or "hunter2" not in repr(caught.value.__context__)


def test_a_request_is_what_http_asks_for() -> None:
    """One piece, every line with its end."""
    assert (
        request_of("/b/k", {"Host": "h"})
        == b"GET /b/k HTTP/1.1\r\nHost: h\r\nAccept-Encoding: identity\r\n\r\n"
    )
