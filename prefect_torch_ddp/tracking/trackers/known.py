"""Which trackers there are, by the names that people type."""

import difflib

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.tracking.trackers.mlflow_tracker import MlflowTracker
from prefect_torch_ddp.tracking.trackers.tracker import Tracker

TRACKERS = {"mlflow": MlflowTracker}


def open_tracker(name: str) -> Tracker:
    """Return a tracker, with the settings that its own environment variables have.

    Raises:
        InvalidParamsError: there is no such tracker, or its package isn't installed.
    """
    if name not in TRACKERS:
        near = difflib.get_close_matches(name, TRACKERS, 1)
        close = "".join(f"; did you mean {each}?" for each in near)
        msg = f"there is no tracker {name}{close}; there is {', '.join(TRACKERS)}"
        raise InvalidParamsError(msg)
    return TRACKERS[name]()
