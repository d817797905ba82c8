"""The models that a finished training exports: plain weights and a card for each.

The weights load with plain PyTorch on any machine.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors.torch import save

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import models_prefix
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.checkpoint.state.objects import read_object
from prefect_torch_ddp.checkpoint.state.serial import from_bytes, is_dense_tensor, to_bytes
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.formats import CARD, location
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)


def export_models(
    storage: Storage,
    manifest: Manifest,
    names: Iterable[str],
    attempt: int,
    about: Mapping[str, Any],
) -> dict[str, str]:
    """Export a checkpoint's models to the attempt's folder; return the URIs of their weights.

    `names` are the tracked objects that are models; `about` is what else the cards say, such as
    `model.json` next to `model.safetensors`. Each attempt has its own folder, so none that
    is held up can undo what a newer one left.

    Raises:
        SupersededError: a newer attempt has begun.
        CheckpointError: the checkpoint has no such object, or it is damaged.
    """
    refuse_superseded(storage, manifest.run_id, attempt)
    prefix = models_prefix(manifest.run_id, attempt)
    uris = {}
    for name in names:
        found = manifest.find(name)
        if found is None:
            checkpoint = f"checkpoint of step {manifest.step} of run {manifest.run_id}"
            msg = f"the {checkpoint} has no object {name!r} to export"
            raise CheckpointError(msg)
        state = from_bytes(read_object(storage, manifest, found))
        suffix, weights = weights_file(name, state)
        values = state.values() if isinstance(state, dict) else ()
        # Tied weights count under each of their names.
        sizes = [value.numel() for value in values if isinstance(value, torch.Tensor)]
        card = {
            **about,
            "file": name + suffix,
            "sha256": hashlib.sha256(weights).hexdigest(),
            "num_bytes": len(weights),
            "num_tensors": len(sizes),
            "num_parameters": sum(sizes),
            "tracked_as": name,
            "run_id": manifest.run_id,
            "step": manifest.step,
            "epoch": manifest.epoch,
            "attempt": manifest.attempt,
            "world_size": manifest.world_size,
            "metrics": manifest.metrics,
        }
        text = json.dumps(CARD.stamp(_as_json(card)), indent=1, allow_nan=False, default=str)
        storage.write(f"{prefix}{name}{suffix}", weights)
        storage.write(f"{prefix}{name}.json", text.encode())
        uris[name] = location(storage, f"{prefix}{name}{suffix}")
        logger.info("exported %s of step %d to %s", name, manifest.step, uris[name])
    return uris


def _as_json(value: Any) -> Any:
    """Return what JSON can hold: other keys than texts, and nan and inf, become text."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def weights_file(name: str, state: Any) -> tuple[str, bytes]:
    """Return suffix and content of the file of a state dict.

    It is .safetensors, with tied weights under each of their names, so that `load_state_dict`
    finds them all. Where safetensors can't hold the state it is .pt, for
    `torch.load(..., weights_only=True)`.
    """
    try:
        return ".safetensors", save(_apart(state), metadata={"format": "pt"})
    except Exception as error:  # noqa: BLE001 - KeyError of a dtype, ValueError, its own
        logger.warning(
            "%s is exported as %s.pt, to be loaded with torch.load(weights_only=True), since "
            "safetensors can't hold it: %s",
            *(name, name, error),
        )
    return ".pt", to_bytes(state)


def _apart(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return dense tensors that share no memory, which is what safetensors takes."""
    seen: set[int] = set()
    apart = {}
    for name, value in state.items():
        if not is_dense_tensor(
            value
        ):  # of a subclass the memory may be none, or mean something else
            msg = f"{name!r} in its state is a {type(value).__name__}, not a plain, dense tensor"
            raise TypeError(msg)
        tensor = value.detach().resolve_conj().resolve_neg().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return apart
