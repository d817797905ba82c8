"""What a closed training leaves: its last and best checkpoint, and its models for others."""

import hashlib
import json
import logging
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from prefect_torch_ddp.checkpoint.export import export_models
from prefect_torch_ddp.checkpoint.manifest import Manifest, best, checkpoint_ref
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.checkpoint.state.own_state import OwnState
from prefect_torch_ddp.data.arrays.statistics import statistics_in
from prefect_torch_ddp.data.datasets.dataset_store import find_dataset
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.records.hiding import hidden

logger = logging.getLogger(__name__)

PACKAGES = ("prefect-torch-ddp", "torch", "torchvision", "numpy", "safetensors")
MOST_CHARACTERS = 50_000
"""If the values of a category have more, a card has only their digest and the first ones."""
FIRST_VALUES = 10


def checkpoints_of(
    config: RankConfig, last: Manifest | None, resumed: Restorer | None, *, has_ended: bool | None
) -> dict[str, Any]:
    """Return the run's checkpoints, and the step that this attempt resumed from.

    Args:
        config: of the run.
        last: the newest checkpoint.
        resumed: what was resumed from.
        has_ended: whether the training has ended, not only stopped; None on ranks other than 0,
            which don't look for the best one.
    """
    restored = None if resumed is None else resumed.manifest
    top = None if has_ended is None else _best_checkpoint(config, warns=has_ended)
    last_ref, best_ref = (
        None if found is None else checkpoint_ref(config.storage, found).model_dump()
        for found in (last, top)
    )
    step = None if restored is None else restored.step
    return {"last_checkpoint": last_ref, "best_checkpoint": best_ref, "resumed_from_step": step}


def export_tracked(
    config: RankConfig,
    last: Manifest | None,
    objects: Mapping[str, Any],
    about: Mapping[str, Any],
) -> dict[str, str]:
    """Export the models of the checkpoint that is evaluated; return their URIs by name.

    Models are what is called "model", and every module. `about` is what their cards say besides
    what the configuration has.
    """
    is_best = config.evaluate_on == "best" and config.checkpoint.best_metric is not None
    chosen = _best_checkpoint(config) if is_best else last
    names = [
        name
        for name, item in objects.items()
        if (name == "model" or isinstance(item, nn.Module)) and not isinstance(item, OwnState)
    ]
    if chosen is None or not names:
        return {}
    about = {**about, **_about(config)}
    return export_models(config.storage, chosen, names, config.attempt, about)


def categories_on_card(categories: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return what a card says of the texts of tables, in the order of their codes, by column."""
    return {name: _on_card(values) for name, values in categories.items()}


def _best_checkpoint(config: RankConfig, *, warns: bool = False) -> Manifest | None:
    """Return the run's best checkpoint by its policy; None if that names no metric."""
    policy = config.checkpoint
    if policy.best_metric is None:
        return None
    found = best(config.storage, config.run_id, policy.best_metric, policy.best_is)
    if found is None and warns:
        text = "there is no best checkpoint: none has a finite value of %r, as reported by rank 0"
        logger.warning(text, policy.best_metric)
    return found


def _about(config: RankConfig) -> dict[str, Any]:
    dataset = config.source_dataset
    if config.dataset_id is not None:
        dataset = find_dataset(config.storage, config.dataset_id)
    shown = {"dataset_id", "digest", "num_files", "num_bytes"}
    about = None if dataset is None else dataset.model_dump(include=shown)
    if about is not None and config.dataset_id is not None:
        found = statistics_in(config.storage, config.dataset_id)
        about |= {"statistics": found} if found else {}
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "options": hidden("", config.options),
        "seed": config.seed,
        "dataset": about,
        "versions": {"python": platform.python_version(), **versions},
    }


def _on_card(values: tuple[str, ...]) -> dict[str, Any]:
    """Return what a card says of the values of a category: all of them, or the first of many."""
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    about = {"num_values": len(values), "sha256": digest}
    if sum(map(len, values)) > MOST_CHARACTERS:
        return {**about, "first": values[:FIRST_VALUES]}
    return {**about, "values": values}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
