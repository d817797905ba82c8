"""Owns the model that a finished training leaves to others: plain weights and a card, each written once and never replaced."""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import model_prefix
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.checkpoint.reading import read_object
from prefect_torch_ddp.checkpoint.weights import WeightsFile, weights_file
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)

CARD = "model.json"
LARGEST_CONDITIONAL_BYTES = 4 * 2**30
"""S3 takes 5 GB at once, and only what goes at once can be written on a condition."""


@dataclass(frozen=True)
class ModelCard:
    """What is on record beside the weights, as plain JSON."""

    file: str
    """The weights' name, in the same folder."""
    sha256: str
    """Of the weights' file."""
    num_bytes: int
    num_tensors: int
    num_parameters: int
    tracked_as: str
    """The name that `rank.track` gave the model."""
    run_id: str
    step: int
    epoch: int
    attempt: int
    """The attempt that wrote the checkpoint."""
    world_size: int
    metrics: Mapping[str, float]
    """The training's newest values when the checkpoint was made."""
    about: Mapping[str, Any]
    """What the caller knows besides: workload, options, data, versions."""

    def as_bytes(self) -> bytes:
        """Return the JSON, `about` on the top level; numbers that aren't finite are text."""
        values = asdict(self)
        about = values.pop("about")
        return json.dumps(_plain({**about, **values}), indent=1, allow_nan=False, default=str).encode()


def _plain(value: Any) -> Any:
    """Return what JSON can hold: other keys than texts and numbers that aren't finite become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def export_model(storage: Storage, manifest: Manifest, name: str, attempt: int, about: Mapping[str, Any]) -> str:
    """Leave a checkpoint's model in `runs/<run_id>/model/`; return the URI of the weights.

    Nothing there is ever replaced or deleted, so an older attempt can't undo what a newer one left. Where an earlier attempt left
    the same weights they stand; where it left others, this one's are in a folder that bears its number.

    Args:
        storage: where the run is.
        manifest: the checkpoint.
        name: the tracked object that is the model.
        attempt: this attempt.
        about: plain values for the card.

    Raises:
        SupersededError: a newer attempt has begun.
        CheckpointError: the checkpoint has no such object, or it is damaged.
        StorageError: the storage failed.
    """
    found = manifest.find(name)
    if found is None:
        msg = f"the checkpoint of step {manifest.step} of run {manifest.run_id} has no object {name!r} to export"
        raise CheckpointError(msg)
    weights = weights_file(bytes(read_object(storage, manifest, found)))
    card = ModelCard(
        file=weights.name,
        sha256=hashlib.sha256(weights.data).hexdigest(),
        num_bytes=len(weights.data),
        num_tensors=weights.num_tensors,
        num_parameters=weights.num_parameters,
        tracked_as=name,
        run_id=manifest.run_id,
        step=manifest.step,
        epoch=manifest.epoch,
        attempt=manifest.attempt,
        world_size=manifest.world_size,
        metrics=manifest.metrics,
        about=about,
    )
    refuse_superseded(storage, manifest.run_id, attempt)
    prefix = model_prefix(manifest.run_id)
    if not _stands(storage, prefix, weights, card):
        refuse_superseded(storage, manifest.run_id, attempt)  # these may be a newer one's, written meanwhile
        prefix = f"{prefix}{attempt:06d}/"  # nobody else's
        storage.write(f"{prefix}{weights.name}", weights.data)
        storage.write(f"{prefix}{CARD}", card.as_bytes())
    uri = f"{storage.uri.rstrip('/')}/{prefix}{weights.name}"
    logger.info("the model of step %d is %s", manifest.step, uri)
    return uri


def _stands(storage: Storage, prefix: str, weights: WeightsFile, card: ModelCard) -> bool:
    """Write weights and card, in this order, where none are; return whether these ones are there now."""
    if len(weights.data) > LARGEST_CONDITIONAL_BYTES:
        return False
    objects = {weights.name: weights.data, CARD: card.as_bytes()}
    return all(
        storage.write_if_absent(prefix + name, data) or storage.read(prefix + name) == data for name, data in objects.items()
    )
