"""The storage in a bucket of a real Ceph RADOS Gateway, which checks signatures, rights, clocks
and certificates."""

import dataclasses
from datetime import timedelta

import pytest

from prefect_torch_ddp.storage.protocol import ObjectPart
from tests.support.ceph_server import run_ceph
from tests.support.s3_conformance import S3Conformance, error_of
from tests.support.storage_conformance import StorageConformance
from tests.support.waiting import becomes_true

pytestmark = pytest.mark.extended


class TestS3StorageOnCeph(StorageConformance, S3Conformance):
    """Everything a storage must do."""

    num_examples = 20

    @pytest.fixture
    def server(self, ceph_server):
        return ceph_server

    @pytest.fixture
    def make_storage(self, ceph_server):
        """Make storages under separate prefixes."""
        return ceph_server.storage


def test_a_wrong_clock_is_named(ceph_server, monkeypatch):
    """The store refuses what a machine signed whose clock is an hour late."""
    import botocore.auth

    now = botocore.auth.get_current_datetime
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: now() - timedelta(hours=1))
    message = error_of(ceph_server.storage().write, "object", b"x")
    assert (
        "this machine's clock differs too much from the store's: set it, for instance by "
        "NTP (RequestTimeTooSkewed" in message
    )


def test_a_certificate_that_is_not_trusted_is_named(ceph_server):
    """The storage works, with conditions, once it is given the store's CA bundle."""
    storage = ceph_server.storage(endpoint_url=ceph_server.tls_endpoint_url)
    message = error_of(storage.read, "object")
    assert "the endpoint's certificate isn't trusted: name its CA bundle" in message
    assert "tried" not in message
    (unread,) = storage.read_many([ObjectPart("object", 1)])
    assert "the endpoint's certificate isn't trusted: name its CA bundle" in str(unread)
    assert "tried" not in str(unread)
    trusting = dataclasses.replace(storage, verify=ceph_server.ca_path)
    trusting.check_writable()
    trusting.write("object", b"over TLS")
    assert ceph_server.storage(storage.prefix).read("object") == b"over TLS"


def test_an_endpoint_with_tls_is_named(ceph_server):
    """The error names http:// to a port that speaks TLS."""
    storage = ceph_server.storage(
        endpoint_url=ceph_server.tls_endpoint_url.replace("https://", "http://"), max_attempts=2
    )
    message = error_of(storage.read, "object")
    assert f"at {storage.endpoint_url}: " in message
    assert "https:// " in message


def test_a_store_that_is_full_is_given_up(tmp_path_factory):
    """A full Ceph never answers writes, so they fail in bounded time; reads continue."""
    with run_ceph(tmp_path_factory.mktemp("ceph"), room_bytes=32 * 2**20) as server:
        storage = dataclasses.replace(server.storage(), read_timeout_s=2.0, max_attempts=2)
        storage.write("object", b"old")
        for number in range(10):
            storage.write(f"filler/{number}", bytes(4 * 2**20))
        assert becomes_true(lambda: "OSD_FULL" in server.ceph("health", "detail"), 60)
        message = error_of(storage.write, "object", b"new")
        assert "the endpoint didn't answer in time" in message
        assert "some stores are silent, too, when they are full" in message
        assert storage.read("object") == b"old"
