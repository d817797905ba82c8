"""What tests of prepared collections share."""

import pytest
from distributed import Client

from prefect_torch_ddp.storage.directory import DirectoryStorage


@pytest.fixture
def client(dask_cluster):
    """Give a client that the test closes: a flow refuses to start while another one is open."""
    with Client(dask_cluster) as client:
        yield client


@pytest.fixture(params=["directory", "s3"])
def storage(request, s3_server, tmp_path, monkeypatch):
    """Give an empty storage of each kind, and caches of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return DirectoryStorage(tmp_path) if request.param == "directory" else s3_server.storage()
