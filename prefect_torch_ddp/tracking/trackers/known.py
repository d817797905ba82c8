"""Which trackers there are, by the names that people type."""

import difflib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.tracking.trackers.mlflow_tracker import MlflowTracker
from prefect_torch_ddp.tracking.trackers.tracker import Tracker


class Kind(NamedTuple):
    """A kind of trackers, and what it needs."""

    make: Callable[[], Tracker]
    module: str
    """What it imports."""
    package: str
    """What brings that module."""


TRACKERS: Mapping[str, Kind] = {"mlflow": Kind(MlflowTracker, "mlflow", "mlflow-skinny")}
"""By the names in `TrackerName` of `params`."""


def check_trackers(names: Iterable[str]) -> None:
    """Check that trackers can be opened here, without loading anything.

    Raises:
        InvalidParamsError: there is no such tracker, or its package isn't installed.
    """
    for name in names:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name, TRACKERS, 1)
            close = "".join(f"; did you mean {each}?" for each in near)
            msg = f"there is no tracker {name}{close}; there is {', '.join(TRACKERS)}"
            raise InvalidParamsError(msg)
        _, module, package = TRACKERS[name]
        if importlib.util.find_spec(module) is None:
            msg = (
                f"the tracker {name} needs the package {package}, which isn't installed: "
                f"run `pip install {package}`, or install prefect-torch-ddp with its extra "
                "`trackers`"
            )
            raise InvalidParamsError(msg)


def open_tracker(name: str) -> Tracker:
    """Return a tracker, with the settings that its own environment variables have.

    Raises:
        InvalidParamsError: there is no such tracker, or its package isn't installed.
    """
    check_trackers([name])
    return TRACKERS[name].make()
