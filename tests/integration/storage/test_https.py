"""A file on a web server is raw data: whole, checked, and nothing in silence."""

import pickle
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import (
    DamagedObjectError,
    InvalidParamsError,
    ObjectChangedError,
    ObjectPart,
    RankContext,
    StorageError,
)
from prefect_torch_ddp.blocks import fingerprint_of, resolve_source
from prefect_torch_ddp.data import read_files
from prefect_torch_ddp.storage import https
from tests.support.https_server import Answers, certificate, https_server

CONTENT = bytes(range(256)) * 40
DIGEST = sha256(CONTENT).hexdigest()


@pytest.fixture
def answers() -> Answers:
    """Give what the server answers."""
    return Answers(CONTENT)


@pytest.fixture
def url(tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the address of a file."""
    pem = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    monkeypatch.setattr(https, "WAIT_S", 0.01)
    https.opener.cache_clear()
    with https_server(answers, pem) as address:
        yield f"{address}/data/my%20names.txt"
    https.opener.cache_clear()


def test_a_file_is_read_as_the_source_of_a_run(url: str, answers: Answers) -> None:
    """In a workload's prepare, under its name; the listing follows its version, or its digest."""
    with RankContext.local(source=url, stage="prepare") as ctx:
        source = pickle.loads(pickle.dumps(ctx.source))
        assert dict(read_files(source)) == {"my names.txt": CONTENT}
        assert list(source.list_objects("other")) == []
    before = fingerprint_of(resolve_source(url))
    assert fingerprint_of(resolve_source(url)) == before
    checked = fingerprint_of(resolve_source(f"{url}#sha256={DIGEST.upper()}"))
    answers.headers["ETag"] = '"2"'
    assert fingerprint_of(resolve_source(url)) != before
    assert fingerprint_of(resolve_source(f"{url}#sha256={DIGEST}")) == checked != before


def test_a_connection_that_breaks_costs_what_was_not_read(url: str, answers: Answers) -> None:
    """Each try begins where the last one ended; only tries that bring nothing count."""
    source = resolve_source(url)
    (listed,) = source.list_objects("")
    answers.bytes_per_answer, answers.statuses, answers.asked = 1000, [503, 200, 0], []
    assert source.read_many([ObjectPart(listed.key, len(CONTENT), etag=listed.etag)]) == [CONTENT]
    assert [first for first, _ in answers.asked[:4]] == [0, 0, 1000, 1000]
    answers.bytes_per_answer = 0
    (error,) = source.read_many([ObjectPart(listed.key, 10, start=5)])
    assert isinstance(error, StorageError)
    assert "ends after 0 of 10 bytes, 4 times" in str(error)


def test_what_is_not_the_listed_file_is_an_error(url: str, answers: Answers) -> None:
    """Another version, another digest, or another name."""
    source = resolve_source(url)
    (listed,) = source.list_objects("")
    answers.headers = {"Last-Modified": "Thu, 26 Nov 2026 08:00:00 GMT"}
    whole = ObjectPart(listed.key, listed.num_bytes, etag=listed.etag)
    changed, missing = source.read_many([whole, ObjectPart("other.txt", 1)])
    assert isinstance(changed, ObjectChangedError)
    assert isinstance(missing, StorageError)
    with pytest.raises(DamagedObjectError, match=DIGEST):
        list(read_files(resolve_source(f"{url}#sha256={'0' * 64}")))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"says_length": False}, InvalidParamsError, "unknown size.*; copy it to a bucket"),
        ({"headers": {}}, InvalidParamsError, "neither ETag nor Last-Modified; append #sha256="),
        (
            {"headers": {"ETag": "1", "Content-Encoding": "gzip"}},
            StorageError,
            "my%20names.txt is sent packed .Content-Encoding: gzip.; copy it to a bucket",
        ),
        ({"statuses": [404]}, StorageError, "404"),
        ({"statuses": [503] * 4}, StorageError, "in 4 tries: Service Unavailable"),
        (
            {"statuses": [0] * 4},
            StorageError,
            "in 4 tries: .* isn't HTTP: BadStatusLine.*HTTP/1.0 0",
        ),
        (
            {"statuses": [302], "headers": {"Location": "https://[::1/x"}},
            StorageError,
            "my%20names.txt can't be read: Invalid IPv6 URL",
        ),
        (
            {"statuses": [302], "headers": {"Location": "https://127.0.0.1:abc/x"}},
            StorageError,
            "my%20names.txt can't be read: nonnumeric port: 'abc'$",
        ),
        (
            {"statuses": [302], "headers": {"Location": "https://127.0.0.1:65536/x"}},
            StorageError,
            "my%20names.txt leads to an address with the port 65536, which is above 65535$",
        ),
        (
            {"headers": {"ETag": "1" * 70_000}},
            StorageError,
            "in 4 tries: the answer can't be read: LineTooLong",
        ),
        (
            {"statuses": [302], "headers": {"Location": "http://127.0.0.1/x?key=secret"}},
            StorageError,
            r"leads to an address with http:, and only https is read$",
        ),
    ],
    ids=[
        "no length",
        "no version",
        "packed",
        "not there",
        "not now",
        "no HTTP",
        "a broken redirect",
        "a redirect to no port",
        "a redirect to too high a port",
        "too long a line",
        "a redirect without TLS",
    ],
)
def test_a_file_that_cannot_be_vouched_for_is_refused_before_a_run(
    url: str, answers: Answers, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    """What the flow lists at its start is refused there, by the address and the reason."""
    for name, value in changes.items():
        setattr(answers, name, value)
    with pytest.raises(error, match=says):
        fingerprint_of(resolve_source(url))


def test_a_packed_file_is_what_it_is(url: str, answers: Answers) -> None:
    """Some servers name the encoding of a file that itself is a .gz."""
    answers.headers["Content-Encoding"] = "x-gzip"
    assert dict(read_files(resolve_source(f"{url}.gz"))) == {"my names.txt.gz": CONTENT}


def test_a_file_that_is_too_large_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be held in memory."""
    monkeypatch.setattr(https, "MAX_BYTES", len(CONTENT) - 1)
    with pytest.raises(InvalidParamsError, match="has 10240 bytes, and at most 10239"):
        fingerprint_of(resolve_source(url))


def test_a_server_without_ranges_is_read_as_a_whole(url: str, answers: Answers) -> None:
    """A part of the file is an error, and never its beginning."""
    answers.serves_ranges = False
    source = resolve_source(url)
    assert dict(read_files(source)) == {"my names.txt": CONTENT}
    (error,) = source.read_many([ObjectPart("my names.txt", 10, start=5)])
    assert isinstance(error, StorageError)
    assert "can't be read in parts" in str(error)
