"""Which trackers there are, by the names that people type."""

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.refusals import unknown
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.trackers.mlflow_tracker import MlflowTracker
from prefect_torch_ddp.tracking.trackers.tensorboard_tracker import TensorboardTracker
from prefect_torch_ddp.tracking.trackers.tracker import Tracker
from prefect_torch_ddp.tracking.trackers.wandb_tracker import WandbTracker


class Kind(NamedTuple):
    """A kind of trackers, and what it needs."""

    make: Callable[[Storage], Tracker]
    """Makes one for the runs of a storage."""
    module: str
    """What it imports."""
    package: str
    """What brings that module."""
    extra: str
    """Which extra of this package has it."""
    check: Callable[[Storage], object] = lambda _: None
    """Checks whether it can be used for the runs of a storage."""


def tensorboard_folder(storage: Storage) -> Path:
    """Return TensorBoard's folder for the runs of a storage.

    Raises:
        InvalidParamsError: TENSORBOARD_LOGGING_DIR isn't set, and the storage is no folder.
    """
    return _folder_for(storage, "tensorboard", "TENSORBOARD_LOGGING_DIR", "tensorboard")


def wandb_folder(storage: Storage) -> Path:
    """Return the folder in which wandb has its folder `wandb`, for the runs of a storage.

    Raises:
        InvalidParamsError: WANDB_DIR isn't set, and the storage is no folder.
    """
    return _folder_for(storage, "wandb", "WANDB_DIR")


TRACKERS: Mapping[str, Kind] = {
    "mlflow": Kind(MlflowTracker, "mlflow", "mlflow-skinny", "trackers"),
    "tensorboard": Kind(
        lambda storage: TensorboardTracker(tensorboard_folder(storage)),
        "tensorboard",
        "tensorboard",
        "tensorboard",
        tensorboard_folder,
    ),
    "wandb": Kind(
        lambda storage: WandbTracker(wandb_folder(storage)), "wandb", "wandb", "wandb", wandb_folder
    ),
}
"""By the names in `TrackerName` of `params`."""


def check_trackers(names: Iterable[str], storage: Storage) -> None:
    """Check that trackers can be opened here for the runs of a storage; loads nothing.

    Raises:
        InvalidParamsError: there is no such tracker, its package isn't installed, or it isn't known
            where it is.
    """
    for name in names:
        if name not in TRACKERS:
            msg = f"{unknown(name, TRACKERS, 'tracker')} (there are {', '.join(TRACKERS)})"
            raise InvalidParamsError(msg)
        kind = TRACKERS[name]
        if importlib.util.find_spec(kind.module) is None:
            msg = (
                f"the tracker {name} needs the package {kind.package}, which isn't installed: "
                f"run `pip install {kind.package}`, or install prefect-torch-ddp with its extra "
                f"`{kind.extra}`"
            )
            raise InvalidParamsError(msg)
        kind.check(storage)


def open_tracker(name: str, storage: Storage) -> Tracker:
    """Return a tracker, with the settings that its own environment variables have.

    Raises:
        InvalidParamsError: as `check_trackers`.
    """
    check_trackers([name], storage)
    return TRACKERS[name].make(storage)


def _folder_for(storage: Storage, tracker: str, variable: str, *within: str) -> Path:
    """Return the folder that a variable of the environment names, or else one of the storage.

    Args:
        storage: of the runs.
        tracker: the name that people type.
        variable: of the environment.
        within: where the folder is within the storage.

    Raises:
        InvalidParamsError: the variable isn't set, and the storage is no folder.
    """
    if given := os.environ.get(variable):
        return Path(given).expanduser().absolute()
    if storage.local_folder is None:
        msg = (
            f"the tracker {tracker} needs a folder, and the storage {storage.uri} is none: set "
            f"{variable}"
        )
        raise InvalidParamsError(msg)
    return storage.local_folder.joinpath(*within)
