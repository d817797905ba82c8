"""Owns what a training has on record: its newest checkpoint, its best one, what is in the way
of the next, and its model.

Owns what rank 0 does with the model of a finished training: which object it is, and what its
card says.
"""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from prefect_torch_ddp.checkpoint.checkpointer import Checkpointer
from prefect_torch_ddp.checkpoint.export import export_model
from prefect_torch_ddp.checkpoint.manifest import Manifest, best, checkpoint_ref, read_manifest
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.data.dataset_store import find_dataset
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.loop.state import Place


class CheckpointStatus:
    """Where a training stands, for those who ask; rank 0 knows."""

    def __init__(self, config: RankConfig, place: Place, objects: Mapping[str, Any]) -> None:
        """Know of nothing yet but the objects that are tracked."""
        self._config = config
        self._place = place
        self._objects = objects
        self._restorer: Restorer | None = None
        self._checkpointer: Checkpointer | None = None

    def begin(self, restorer: Restorer, checkpointer: Checkpointer | None) -> None:
        """Learn where the training went on, and who writes its checkpoints."""
        self._restorer = restorer
        self._checkpointer = checkpointer

    @property
    def last(self) -> Manifest | None:
        """The run's newest checkpoint, on rank 0; None where there is none."""
        last = self._checkpointer.last if self._checkpointer is not None else None
        if (
            last is None
            and self._place.rank == 0
            and self._restorer is not None
            and self._restorer.is_ours
        ):
            return self._restorer.manifest
        return last

    @property
    def last_step(self) -> int | None:
        """The number of that checkpoint."""
        last = self.last
        return None if last is None else last.step

    def trouble(self) -> str:
        """Say, on rank 0, since when there has been no checkpoint and why; nothing where the
        last one that was due is there.
        """
        reason = self._checkpointer.trouble if self._checkpointer is not None else ""
        if not reason:
            return ""
        return f"no checkpoint {'yet' if self.last_step is None else f'since step {self.last_step}'}: {reason}"

    def outcome(self) -> dict[str, Any]:
        """Return the run's checkpoints, on rank 0, and where this attempt resumed from."""
        storage, run_id, policy = self._config.storage, self._config.run_id, self._config.checkpoint
        restored = self._restorer.manifest if self._restorer is not None else None
        last = self.last
        top = None
        if policy.best_metric is not None and self._place.rank == 0:
            top = best(storage, run_id, policy.best_metric, policy.best_mode)
        return {
            "last_checkpoint": None if last is None else checkpoint_ref(storage, last).model_dump(),
            "best_checkpoint": None if top is None else top.model_dump(),
            "resumed_from_step": None if restored is None else restored.step,
        }

    def export_model(self, workload: str) -> str | None:
        """Leave the model of the checkpoint that is evaluated, on rank 0; return its URI, None
        where there is none.
        """
        config, policy = self._config, self._config.checkpoint
        chosen = self.last
        if config.evaluate_on == "best" and policy.best_metric is not None:
            top = best(config.storage, config.run_id, policy.best_metric, policy.best_mode)
            chosen = (
                None
                if top is None
                else read_manifest(config.storage, config.run_id, top.step, top.attempt)
            )
        name = model_among(self._objects)
        return (
            None if chosen is None or name is None else leave_model(config, workload, chosen, name)
        )


PACKAGES = ("prefect-torch-ddp", "torch", "torchvision", "numpy", "safetensors")


def model_among(objects: Mapping[str, Any]) -> str | None:
    """Return the name of the tracked object that is the model: "model", or the only module;
    None where it can't be told.
    """
    if "model" in objects:
        return "model"
    modules = [name for name, item in objects.items() if isinstance(item, nn.Module)]
    return modules[0] if len(modules) == 1 else None


def leave_model(config: RankConfig, workload: str, manifest: Manifest, name: str) -> str:
    """Export a checkpoint's model with all that is known of the run; return the URI of the
    weights.

    Raises:
        SupersededError, CheckpointError, StorageError: as `export_model`.
    """
    dataset = None if config.dataset_id is None else find_dataset(config.storage, config.dataset_id)
    about = {
        "workload": workload,
        "options": dict(config.options),
        "seed": config.seed,
        "dataset": None
        if dataset is None
        else dataset.model_dump(include={"dataset_id", "digest", "num_files", "num_bytes"}),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
        },
    }
    return export_model(config.storage, manifest, name, config.attempt, about)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
