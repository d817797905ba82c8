"""Owns the model that a finished training leaves to others: plain weights and a card, each
written once and never replaced.

Owns how a model's state becomes a file that plain PyTorch loads on any machine.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import model_prefix
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.checkpoint.objects import read_object
from prefect_torch_ddp.checkpoint.serial import from_bytes
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightsFile:
    """A file of weights: plain names, without `module.`."""

    name: str
    """model.safetensors; or model.pt, for `torch.load(..., weights_only=True)`, where
    safetensors can't hold the state."""
    data: bytes
    num_tensors: int
    num_parameters: int
    """Numbers in all tensors together, buffers included; tied weights count as often as they
    are named."""


def weights_file(state_data: bytes) -> WeightsFile:
    """Make the file of a state dict as a checkpoint holds it.

    Tied weights are written under each of their names, so that `load_state_dict` finds them
    all.

    Args:
        state_data: what `serial.to_bytes` made of the state dict; it is the file itself where
            safetensors can't hold the state.
    """
    state = from_bytes(state_data)
    values = state.values() if isinstance(state, dict) else ()
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = len(tensors), sum(tensor.numel() for tensor in tensors)
    try:
        return WeightsFile("model.safetensors", _safetensors_of(state), *sizes)
    except _UnfitError as error:
        logger.warning(
            "the model is left as model.pt, to be loaded with torch.load(weights_only=True): %s",
            error,
        )
        return WeightsFile("model.pt", state_data, *sizes)


class _UnfitError(Exception):
    """Safetensors can't hold the state."""


def _safetensors_of(state: Any) -> bytes:
    try:
        from safetensors.torch import save  # noqa: PLC0415 - where it isn't installed there is the other way
    except ImportError as error:
        msg = "the package safetensors is not installed here"
        raise _UnfitError(msg) from error
    if not isinstance(state, dict):
        msg = f"its state is a {type(state).__name__} and no dict"
        raise _UnfitError(msg)
    for name, value in state.items():
        if (
            not isinstance(name, str)
            or type(value) not in (torch.Tensor, torch.nn.Parameter)
            or value.layout is not torch.strided
        ):
            msg = f"{name!r} in its state is a {type(value).__name__} and no plain, dense tensor with a name"
            raise _UnfitError(msg)
    try:
        return save(_apart(state), metadata={"format": "pt"})
    except (
        Exception
    ) as error:  # it refuses in every way: KeyError of a dtype, ValueError, an error of its own
        msg = f"safetensors refuses it: {type(error).__name__}: {error}"
        raise _UnfitError(msg) from error


def _apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return dense tensors that share no memory, which is what safetensors takes."""
    seen: set[int] = set()
    apart = {}
    for name, value in state.items():
        tensor = value.detach().resolve_conj().resolve_neg().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return apart


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
    """The name that `ctx.track` gave the model."""
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
        return json.dumps(
            _plain({**about, **values}), indent=1, allow_nan=False, default=str
        ).encode()


def _plain(value: Any) -> Any:
    """Return what JSON can hold: other keys than texts and numbers that aren't finite become
    text.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def export_model(
    storage: Storage, manifest: Manifest, name: str, attempt: int, about: Mapping[str, Any]
) -> str:
    """Leave a checkpoint's model in `runs/<run_id>/model/`; return the URI of the weights.

    Nothing there is ever replaced or deleted, so an older attempt can't undo what a newer one
    left. Where an earlier attempt left the same weights they stand; where it left others, this
    one's are in a folder that bears its number.

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
        refuse_superseded(
            storage, manifest.run_id, attempt
        )  # these may be a newer one's, written meanwhile
        prefix = f"{prefix}{attempt:06d}/"  # nobody else's
        storage.write(f"{prefix}{weights.name}", weights.data)
        storage.write(f"{prefix}{CARD}", card.as_bytes())
    uri = f"{storage.uri.rstrip('/')}/{prefix}{weights.name}"
    logger.info("the model of step %d is %s", manifest.step, uri)
    return uri


def _stands(storage: Storage, prefix: str, weights: WeightsFile, card: ModelCard) -> bool:
    """Write weights and card, in this order, where none are; return whether these ones are
    there now.
    """
    if len(weights.data) > LARGEST_CONDITIONAL_BYTES:
        return False
    objects = {weights.name: weights.data, CARD: card.as_bytes()}
    return all(
        storage.write_if_absent(prefix + name, data) or storage.read(prefix + name) == data
        for name, data in objects.items()
    )
