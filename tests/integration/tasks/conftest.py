"""What tests of prepared collections share."""

import pytest
from distributed import Client

from prefect_torch_ddp.storage.directory import DirectoryStorage


@pytest.fixture
def client(dask_cluster):
    """Give a client that the test closes: a flow refuses to start while another one is open."""
    with Client(dask_cluster) as client:
        yield client


CEPH = pytest.param("ceph_server", marks=pytest.mark.extended, id="ceph")


@pytest.fixture(scope="session", params=["directory", pytest.param("s3_server", id="s3"), CEPH])
def server(request):
    """Give an S3 server of each kind, or None for a directory. Servers are older than the test."""
    return None if request.param == "directory" else request.getfixturevalue(request.param)


@pytest.fixture
def storage(server, tmp_path, monkeypatch):
    """Give an empty storage of each kind, and caches of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return DirectoryStorage(tmp_path) if server is None else server.storage()
