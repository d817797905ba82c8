"""The objects that user code tracks: which are allowed, how they unwrap, the models among them."""

import logging
import platform
import re
from collections.abc import Container, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prefect_torch_ddp.checkpoint.export import export_models
from prefect_torch_ddp.checkpoint.manifest import Manifest, best
from prefect_torch_ddp.checkpoint.serial import group_sizes
from prefect_torch_ddp.checkpoint.shards import OwnState
from prefect_torch_ddp.data.dataset_store import find_dataset
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import RankConfig, Stage
from prefect_torch_ddp.rank.training.progress import TrainingState
from prefect_torch_ddp.records.hiding import hidden

logger = logging.getLogger(__name__)

PACKAGES = ("prefect-torch-ddp", "torch", "torchvision", "numpy", "safetensors")
_NAME = re.compile(r"[A-Za-z0-9_]{1,100}")


def check_trackable(
    objects: Mapping[str, Any], tracked: Container[str], stage: Stage, *, has_begun: bool
) -> None:
    """Refuse what can't be tracked, by its name; `tracked` are taken, `steps` may have begun."""
    if has_begun:
        late = f"ctx.track({', '.join(objects)}) came after ctx.steps had begun"
        msg = f"{late}: track everything before the first step"
        raise InvalidParamsError(msg)
    if stage == "prepare":
        msg = "ctx.track in prepare: there is nothing to resume; write the dataset below ctx.data"
        raise InvalidParamsError(msg)
    for name, item in objects.items():
        methods = ("state_dict", "load_state_dict")
        lacking = [method for method in methods if not callable(getattr(item, method, None))]
        if not _NAME.fullmatch(name):  # it becomes part of a key
            msg = f"{name!r} can't name a tracked object: use letters, digits and underscores"
        elif name in tracked:
            msg = f"{name!r} is tracked already; every tracked object needs a name of its own"
        elif lacking:
            lacks = " and no ".join(lacking)
            msg = (
                f"{name!r} can't be tracked: {type(item).__name__} has no {lacks}; for values of "
                "your own track an object with both: state_dict() returns them, and "
                "load_state_dict(state) takes them over"
            )
        else:
            continue
        raise InvalidParamsError(msg)


def unwrapped(item: Any) -> Any:
    """Return the bare module of a DDP or compiled one, whose weights load without a prefix.

    Anything else is returned as it is.
    """
    while isinstance(item, nn.Module):
        is_ddp = isinstance(item, DistributedDataParallel)
        inner = item.module if is_ddp else getattr(item, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            break
        item = inner
    return item


def warn_of_groups(sizes: dict[str, list[int]], objects: Mapping[str, Any]) -> None:
    """Note how many parameters each group of each optimizer has; warn if they were others.

    A checkpoint with more of them doesn't fit an optimizer as it is at the start.
    """
    for name, item in objects.items():
        now = group_sizes(item)
        before, sizes[name] = sizes.get(name, now), now
        if before != now:
            text = (
                "the tracked optimizer %r has %s, and had %s when it was tracked: its checkpoints "
                "from here on can't be resumed unless all are there before ctx.track, with lr=0 "
                "for those that come later"
            )
            logger.warning(text, name, _spelled_sizes(now), _spelled_sizes(before))


def _spelled_sizes(sizes: Sequence[int]) -> str:
    groups = "group" if len(sizes) == 1 else "groups"
    return f"{len(sizes)} parameter {groups} of {', '.join(map(str, sizes))} parameters"


def best_checkpoint(config: RankConfig, ended: TrainingState | None = None) -> Manifest | None:
    """Return the run's best checkpoint by its policy; None where that names no metric.

    Where a training has ended, not only stopped, and none has the metric, it is said.
    """
    policy = config.checkpoint
    if policy.best_metric is None:
        return None
    found = best(config.storage, config.run_id, policy.best_metric, policy.best_mode)
    if found is None and ended is not None and ended.stopped_by is None:
        text = "no checkpoint is the best one: none has a finite %r, as rank 0 reported it"
        logger.warning(text, policy.best_metric)
    return found


def export_tracked(
    config: RankConfig, last: Manifest | None, objects: Mapping[str, Any], workload: str
) -> dict[str, str]:
    """Export the models of the checkpoint that is evaluated; return their URIs by name.

    Models are what is called "model", and every module.
    """
    is_best = config.evaluate_on == "best" and config.checkpoint.best_metric is not None
    chosen = best_checkpoint(config) if is_best else last
    names = [
        name
        for name, item in objects.items()
        if (name == "model" or isinstance(item, nn.Module)) and not isinstance(item, OwnState)
    ]
    if chosen is None or not names:
        return {}
    about = _about(config, workload)
    return export_models(config.storage, chosen, names, config.attempt, about)


def _about(config: RankConfig, workload: str) -> dict[str, Any]:
    dataset = None if config.dataset_id is None else find_dataset(config.storage, config.dataset_id)
    shown = {"dataset_id", "digest", "num_files", "num_bytes"}
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "workload": workload,
        "options": hidden("", config.options),
        "seed": config.seed,
        "dataset": None if dataset is None else dataset.model_dump(include=shown),
        "versions": {"python": platform.python_version(), **versions},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
