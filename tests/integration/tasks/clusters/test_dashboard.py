"""The URL of Dask's dashboard."""

import urllib.request

import pytest
from distributed import Client

from prefect_torch_ddp.tasks.clusters.dashboard import dashboard_of


@pytest.mark.timeout(120)
def test_the_url_is_the_schedulers_and_empty_without_bokeh(dask_cluster, tmp_path, monkeypatch):
    """Dask serves health checks next to its dashboard, without bokeh too."""
    (tmp_path / "bokeh.py").write_text("")
    with Client(dask_cluster.scheduler_address) as client:
        monkeypatch.setattr("sys.path", [str(tmp_path)])
        url = dashboard_of(client)
        monkeypatch.setattr("sys.path", [])
        assert dashboard_of(client) == ""
    health = url.removesuffix("/status") + "/health"
    with urllib.request.urlopen(health, timeout=30) as answer:
        assert answer.read() == b"ok"
