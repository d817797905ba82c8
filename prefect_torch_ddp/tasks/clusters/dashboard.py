"""Where the Dask dashboard of a training's cluster is."""

from importlib.util import find_spec

import distributed


def dashboard_of(client: distributed.Client) -> str:
    """Return the URL of the cluster's dashboard, as Dask's settings write it; empty without one.

    Dask draws it with bokeh. If that isn't installed here, the scheduler most likely lacks it
    too, and the URL would only lead to a page that says so.
    """
    return "" if find_spec("bokeh") is None else str(client.dashboard_link)
