"""Where the Dask dashboard of a training's cluster is, and how to open it from afar."""

import socket
from importlib.util import find_spec
from urllib.parse import urlsplit

import dask
import distributed

DASK_WRITES = "{scheme}://{host}:{port}/status"
"""How Dask writes the URL, unless `distributed.dashboard.link` is set, for example to a proxy's."""
_OWN_HOSTS = ("127.0.0.1", "localhost", "::1")


def dashboard_of(client: distributed.Client) -> str:
    """Return the URL of the cluster's dashboard, as Dask's settings write it; empty without one.

    Dask draws it with bokeh. If that isn't installed here, the scheduler most likely lacks it
    too, and the URL would only lead to a page that says so.
    """
    return "" if find_spec("bokeh") is None else str(client.dashboard_link)


def tunnel_to(url: str) -> str:
    """Return the command that forwards the dashboard's port to the machine of a browser.

    Empty without a URL, and for one that somebody has set: it is where browsers find the dashboard.

    Args:
        url: of the dashboard, as `dashboard_of` returns it in the same process.
    """
    if not url or dask.config.get("distributed.dashboard.link") != DASK_WRITES:
        return ""
    found = urlsplit(url)
    if found.hostname is None or found.port is None:
        return ""
    # A dashboard that listens only on its own machine has its scheduler there, and so this process.
    is_here = found.hostname in _OWN_HOSTS
    host = "localhost" if is_here else found.netloc.rpartition(":")[0]
    through = socket.gethostname() if is_here else "you@login-node"
    return f"ssh -N -L {found.port}:{host}:{found.port} {through}"
