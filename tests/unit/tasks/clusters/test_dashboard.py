"""The command that opens a dashboard from another machine."""

import socket

import dask
import pytest

from prefect_torch_ddp.tasks.clusters.dashboard import tunnel_to

HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("url", "tunnel"),
    [
        ("http://127.0.0.1:8787/status", f"ssh -N -L 8787:localhost:8787 {HERE}"),
        ("http://localhost:40001/status", f"ssh -N -L 40001:localhost:40001 {HERE}"),
        ("https://10.0.0.1:8787/status", "ssh -N -L 8787:10.0.0.1:8787 you@login-node"),
        ("http://[fe80::1]:8787/status", "ssh -N -L 8787:[fe80::1]:8787 you@login-node"),
        ("http://dashboards.example/status", ""),
        ("", ""),
    ],
)
def test_a_port_is_forwarded_through_a_machine_that_reaches_it(url: str, tunnel: str) -> None:
    """A scheduler that listens only on its own machine is reached through that machine."""
    assert tunnel_to(url) == tunnel


def test_an_address_that_somebody_has_set_needs_no_tunnel() -> None:
    """`distributed.dashboard.link` is where browsers find the dashboard, for example a proxy."""
    with dask.config.set({"distributed.dashboard.link": "https://hub/user/me/proxy/{port}/status"}):
        assert tunnel_to("https://hub:443/user/me/proxy/8787/status") == ""
