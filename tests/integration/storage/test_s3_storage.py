"""The storage in a bucket passes the conformance suite on a real server, refusals and a cut
wire."""

import dataclasses
import socket

import pytest

from prefect_torch_ddp.errors import ObjectNotFoundError, StorageError
from prefect_torch_ddp.storage.locate import storage_from_uri
from prefect_torch_ddp.storage.protocol import ObjectPart
from prefect_torch_ddp.storage.s3.client import client_of
from prefect_torch_ddp.storage.s3.storage import S3Storage
from tests.support.s3_conformance import SECRET, S3Conformance, error_of
from tests.support.s3_server import Wire, answer
from tests.support.storage_conformance import StorageConformance


class TestS3Storage(StorageConformance, S3Conformance):
    """Everything a storage must do."""

    num_examples = 10  # a server in Python is slow; Ceph has more of both
    num_races = 2

    @pytest.fixture
    def server(self, s3_server):
        return s3_server

    @pytest.fixture
    def make_storage(self, s3_server):
        """Make storages under separate prefixes."""
        return s3_server.storage


# ---- Refusals: each names bucket, key and the way out, and shows no secret.


@pytest.mark.parametrize(
    ("is_silent", "says"), [(True, "didn't answer in time"), (False, "can't be reached")]
)
def test_an_endpoint_that_is_dead_or_silent_is_given_up_and_named(
    is_silent: bool, says: str
) -> None:
    """A server that takes the request and never answers doesn't hold a run forever."""
    with socket.socket() as listener:
        # Bound and not listening: it refuses, and nobody else takes the port.
        listener.bind(("127.0.0.1", 0))
        if is_silent:
            listener.listen()
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        keys = {"access_key_id": "k", "secret_access_key": SECRET}
        options = {"endpoint_url": endpoint, "read_timeout_s": 0.3, "max_attempts": 2}
        message = error_of(S3Storage("bucket", **keys, **options).read, "object")
    assert endpoint in message
    assert says in message
    assert SECRET not in message


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (403, "RequestTimeTooSkewed", "clock"),
        (400, "AuthorizationHeaderMalformed", "region"),
        (400, "ExpiredToken", "expired"),
        (501, "NotImplemented", "conditional writes"),
        (507, "SomeStoresOwnCode", "full"),
        (418, "Teapot", "manual"),
    ],
)
def test_other_refusals_say_what_to_do(wire, over_wire, status, code, expected):
    """Errors for clock, region, token and unable stores have the way out and the store's code."""
    storage = dataclasses.replace(over_wire, max_attempts=1)
    wire.faults = [("PUT", answer(status, code))]
    message = error_of(storage.write_if_absent, "object", b"x")
    assert expected in message
    assert code in message


# ---- What the network does to requests.


def test_a_store_that_ignores_conditions_is_refused(open_s3_server):
    """The probe notices that the second conditional write won, says so and cleans up."""
    with Wire(open_s3_server.endpoint_url, without_header="if-none-match") as wire:
        storage = open_s3_server.storage(endpoint_url=wire.endpoint_url)
        says = r"doesn't honour conditional writes .*two runs could commit"
        with pytest.raises(StorageError, match=says):
            storage.check_writable()
        assert list(storage.list()) == []


def test_anonymous_requests_are_not_signed(wire, open_s3_server):
    """A public bucket is read without credentials."""
    client = client_of(open_s3_server.storage())
    client.put_object(Bucket="bucket", Key="public/object", Body=b"1", ACL="public-read")
    client.put_object(Bucket="bucket", Key="public/private", Body=b"2")
    storage = S3Storage("bucket", "public", endpoint_url=wire.endpoint_url, anonymous=True)
    assert storage.read("object") == b"1"
    assert "Authorization" not in wire.exchanges[-1].headers
    assert "access denied" in error_of(storage.read, "private")


def test_keys_that_are_replaced_in_their_file_are_used(chain_s3_server, monkeypatch, tmp_path):
    """A program that renews keys writes them into AWS's file: who reads and writes goes on."""

    def put_keys(user: str) -> None:
        key, secret = chain_s3_server.keys[user]
        new = tmp_path / "new"
        new.write_text(f"[p]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        new.replace(tmp_path / "credentials")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "p")
    storage, part = storage_from_uri("s3://bucket/replaced-keys"), ObjectPart("object", 1)
    put_keys("reader")
    with pytest.raises(StorageError, match="access denied"):
        storage.write("object", b"1")
    put_keys("owner")
    storage.write("object", b"1")
    assert list(storage.read_many([part])) == [b"1"]
    client = client_of(storage)
    storage.write("object", b"2")
    assert client_of(storage) is client


def test_another_environment_is_another_client(chain_s3_server, monkeypatch):
    """An s3:// URI follows AWS's variables, and corrected variables get another client."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    uri = "s3://bucket/from-another-environment"
    storage, part = storage_from_uri(uri), ObjectPart("object", 1)
    with pytest.raises(StorageError, match="secret"):
        storage.write("object", b"1")
    assert all(isinstance(found, StorageError) for found in storage.read_many([part]))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", chain_s3_server.keys["owner"][1])
    storage.check_writable()
    storage.write("object", b"1")
    assert list(storage.read_many([part])) == [b"1"]
    with pytest.raises(ObjectNotFoundError, match=chain_s3_server.endpoint_url):
        storage.read("absent")
    assert client_of(storage) is client_of(storage_from_uri(uri))
