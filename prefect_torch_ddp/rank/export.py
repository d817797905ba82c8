"""Owns what rank 0 does with the model of a finished training: which object it is, and what its card says."""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from prefect_torch_ddp.checkpoint.export import export_model
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.data.dataset_store import find_dataset
from prefect_torch_ddp.rank.config import RankConfig

PACKAGES = ("prefect-torch-ddp", "torch", "torchvision", "numpy", "safetensors")


def model_among(objects: Mapping[str, Any]) -> str | None:
    """Return the name of the tracked object that is the model: "model", or the only module; None where it can't be told."""
    if "model" in objects:
        return "model"
    modules = [name for name, item in objects.items() if isinstance(item, nn.Module)]
    return modules[0] if len(modules) == 1 else None


def leave_model(config: RankConfig, workload: str, manifest: Manifest, name: str) -> str:
    """Export a checkpoint's model with all that is known of the run; return the URI of the weights.

    Raises:
        SupersededError, CheckpointError, StorageError: as `export_model`.
    """
    dataset = None if config.dataset_id is None else find_dataset(config.storage, config.dataset_id)
    about = {
        "workload": workload,
        "options": dict(config.options),
        "seed": config.seed,
        "dataset": None if dataset is None else dataset.model_dump(include={"dataset_id", "digest", "num_files", "num_bytes"}),
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in PACKAGES}},
    }
    return export_model(config.storage, manifest, name, config.attempt, about)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
