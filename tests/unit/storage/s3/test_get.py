"""The lean GET reads an answer from a real socket as http.client does, or leaves it to
botocore. Its headers are botocore's for any key, path, host, region and moment."""

import http.client
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import pairwise
from urllib.parse import urlsplit

import pytest
from botocore import auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.storage.s3.get import Answer, GetSigner, read_answer, request_of
from prefect_torch_ddp.storage.s3.read import quoted

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
    """The body may be cut anywhere; an answer with a cut head may be left to botocore."""
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
    """The answer is left to botocore as soon as enough of it has arrived."""
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
    """A head that contradicts itself is read as http.client reads it, or not at all."""
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
    """A line break in a listed ETag or a token adds no header."""
    expected = b"GET /b/k HTTP/1.1\r\nhost: h\r\naccept-encoding: identity\r\n\r\n"
    assert request_of("/b/k", {"host": "h"}) == expected
    for value in ('"a"\r\nX-Evil: 1', '"a"\n', "a\r", '"\u03b1"'):
        assert request_of("/b/k", {"host": "h", "if-match": value}) is None


HOSTS = (
    "http://127.0.0.1:9000",
    "https://bucket.s3.eu-west-1.amazonaws.com",
    "http://[::1]:80",
    "https://s3.example:443",
    "http://a.b:8080",
)
SECRETS = st.text("abcXYZ0189+/=", min_size=1, max_size=40)


def _by_botocore(url: str, region: str, credentials: Credentials, at_s: int) -> dict[str, str]:
    request = AWSRequest(method="GET", url=url)
    moment = datetime.fromtimestamp(at_s, UTC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "get_current_datetime", lambda: moment)
        auth.S3SigV4Auth(credentials.get_frozen_credentials(), "s3", region).add_auth(request)
    return {name.lower(): value for name, value in request.headers.items()}


@settings(max_examples=200, deadline=None)
@given(
    host=st.sampled_from(HOSTS),
    key=st.text(min_size=1, max_size=30).filter(
        lambda text: text.isprintable() and not text.startswith("/")
    ),
    region=st.sampled_from(["us-east-1", "eu-central-1"]),
    secret=SECRETS,
    token=st.none() | SECRETS,
    at_s=st.integers(0, 4_000_000_000),
)
def test_the_same_as_botocore(
    *, host: str, key: str, region: str, secret: str, token: str | None, at_s: int
) -> None:
    """Of every header that botocore signs."""
    url = f"{host}/bucket/{quoted(key)}"
    credentials = Credentials("AKIDEXAMPLE", secret, token)
    made = GetSigner(host, region, credentials).headers(urlsplit(url).path, at_s)
    made = {name.lower(): value for name, value in made.items()}
    assert made.pop("host") == auth._host_from_url(url)
    assert made == _by_botocore(url, region, credentials, at_s)


def test_a_new_day_and_new_credentials_have_a_key_of_their_own() -> None:
    """Credentials that renew themselves are asked each time; the key that is kept is a day's."""
    credentials = Credentials("AKIDEXAMPLE", "one", None)
    signer = GetSigner(HOSTS[0], "us-east-1", credentials)
    for secret, at_s in (("one", 86_399), ("one", 86_400), ("two", 86_400), ("one", 86_399)):
        credentials.secret_key = secret
        expected = _by_botocore(f"{HOSTS[0]}/b/k", "us-east-1", credentials, at_s)
        assert signer.headers("/b/k", at_s)["Authorization"] == expected["authorization"]


def test_without_credentials_nothing_is_signed() -> None:
    """As for public data."""
    signer = GetSigner("https://data.example/b/", "us-east-1", None)
    assert signer.headers("/b/k") == {"host": "data.example"}
