"""A training's checkpoints as seen from outside: the newest, the best, trouble, and the model."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from prefect_torch_ddp.checkpoint.checkpointer import Checkpointer
from prefect_torch_ddp.checkpoint.export import export_model
from prefect_torch_ddp.checkpoint.manifest import Manifest, best, checkpoint_ref, read_manifest
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.data.dataset_store import find_dataset
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.saving.tracked import model_among
from prefect_torch_ddp.results import CheckpointRef

PACKAGES = ("prefect-torch-ddp", "torch", "torchvision", "numpy", "safetensors")


class CheckpointStatus:
    """What is known of a training's checkpoints; rank 0 knows."""

    def __init__(self, config: RankConfig, info: RankInfo, objects: Mapping[str, Any]) -> None:
        """Start with the tracked objects alone."""
        self._config = config
        self._info = info
        self._objects = objects
        self._restorer: Restorer | None = None
        self._checkpointer: Checkpointer | None = None

    def begin(self, restorer: Restorer, checkpointer: Checkpointer | None) -> None:
        """Take what the training resumed from, and what writes its checkpoints."""
        self._restorer = restorer
        self._checkpointer = checkpointer

    @property
    def last(self) -> Manifest | None:
        """The run's newest checkpoint, on rank 0; None where there is none."""
        last = self._checkpointer.last if self._checkpointer is not None else None
        if last is not None or self._info.rank != 0:
            return last
        restorer = self._restorer
        return restorer.manifest if restorer is not None and restorer.is_ours else None

    @property
    def last_step(self) -> int | None:
        """The number of that checkpoint."""
        last = self.last
        return None if last is None else last.step

    def trouble(self) -> str:
        """Say, on rank 0, since when there has been no checkpoint and why, or nothing."""
        reason = self._checkpointer.trouble if self._checkpointer is not None else ""
        if not reason:
            return ""
        since = "yet" if self.last_step is None else f"since step {self.last_step}"
        return f"no checkpoint {since}: {reason}"

    def outcome(self) -> dict[str, Any]:
        """Return the run's checkpoints, on rank 0, and where this attempt resumed from."""
        restored = self._restorer.manifest if self._restorer is not None else None
        last, top = self.last, self._best() if self._info.rank == 0 else None
        ref = None if last is None else checkpoint_ref(self._config.storage, last)
        return {
            "last_checkpoint": None if ref is None else ref.model_dump(),
            "best_checkpoint": None if top is None else top.model_dump(),
            "resumed_from_step": None if restored is None else restored.step,
        }

    def export_model(self, workload: str) -> str | None:
        """Export, on rank 0, the model of the checkpoint that is evaluated; return its URI.

        None where there is no such checkpoint, or no tracked object is the model.
        """
        config, chosen = self._config, self.last
        if config.evaluate_on == "best" and config.checkpoint.best_metric is not None:
            top = self._best()
            at = None if top is None else (top.step, top.attempt)
            chosen = None if at is None else read_manifest(config.storage, config.run_id, *at)
        name = model_among(self._objects)
        if chosen is None or name is None:
            return None
        about = _about(config, workload)
        return export_model(config.storage, chosen, name, config.attempt, about)

    def _best(self) -> CheckpointRef | None:
        config, policy = self._config, self._config.checkpoint
        if policy.best_metric is None:
            return None
        return best(config.storage, config.run_id, policy.best_metric, policy.best_mode)


def _about(config: RankConfig, workload: str) -> dict[str, Any]:
    dataset = None if config.dataset_id is None else find_dataset(config.storage, config.dataset_id)
    shown = {"dataset_id", "digest", "num_files", "num_bytes"}
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "workload": workload,
        "options": dict(config.options),
        "seed": config.seed,
        "dataset": None if dataset is None else dataset.model_dump(include=shown),
        "versions": {"python": platform.python_version(), **versions},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
