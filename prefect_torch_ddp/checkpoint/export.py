"""The model that a finished training exports: plain weights and a card, never replaced.

The weights load with plain PyTorch on any machine.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import model_prefix
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.checkpoint.objects import read_object
from prefect_torch_ddp.checkpoint.serial import from_bytes, is_plain
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.protocol import Storage

CARD = "model.json"
LARGEST_CONDITIONAL_BYTES = 4 * 2**30
"""S3 takes 5 GB in one request, and only a single request can be conditional."""

logger = logging.getLogger(__name__)


def export_model(
    storage: Storage, manifest: Manifest, name: str, attempt: int, about: Mapping[str, Any]
) -> str:
    """Export a checkpoint's model to `runs/<run_id>/model/`; return the URI of the weights.

    Nothing there is ever replaced or deleted, so an older attempt can't undo what a newer one
    left. Equal weights of an earlier attempt stand; beside others this attempt's are written to
    a folder that bears its number. `name` is the tracked object that is the model, `about`
    what else the card, `model.json`, says.

    Raises:
        SupersededError: a newer attempt has begun.
        CheckpointError: the checkpoint has no such object, or it is damaged.
        StorageError: the storage failed.
    """
    found = manifest.find(name)
    if found is None:
        checkpoint = f"checkpoint of step {manifest.step} of run {manifest.run_id}"
        msg = f"the {checkpoint} has no object {name!r} to export"
        raise CheckpointError(msg)
    state_data = bytes(read_object(storage, manifest, found))
    state = from_bytes(state_data)
    file, weights = weights_file(state, state_data)
    card = {
        **about,
        "file": file,
        "sha256": hashlib.sha256(weights).hexdigest(),
        "num_bytes": len(weights),
        **_sizes(state),
        "tracked_as": name,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "attempt": manifest.attempt,
        "world_size": manifest.world_size,
        "metrics": manifest.metrics,
    }
    files = {
        file: weights,
        CARD: json.dumps(_plain(card), indent=1, allow_nan=False, default=str).encode(),
    }
    refuse_superseded(storage, manifest.run_id, attempt)
    prefix = model_prefix(manifest.run_id)
    if len(weights) > LARGEST_CONDITIONAL_BYTES or not _put(storage, prefix, files):
        # Those that are there may be a newer attempt's, written meanwhile.
        refuse_superseded(storage, manifest.run_id, attempt)
        prefix = f"{prefix}{attempt:06d}/"
        for path, data in files.items():
            storage.write(prefix + path, data)
    uri = f"{storage.uri.rstrip('/')}/{prefix}{file}"
    logger.info("the model of step %d is %s", manifest.step, uri)
    return uri


def _put(storage: Storage, prefix: str, files: Mapping[str, bytes]) -> bool:
    """Write files, in order, where none are; return whether these ones are there now."""
    return all(
        storage.write_if_absent(prefix + path, data) or storage.read(prefix + path) == data
        for path, data in files.items()
    )


def _sizes(state: Any) -> dict[str, int]:
    """Count tensors, and the numbers in them; tied weights count under each of their names."""
    values = state.values() if isinstance(state, dict) else ()
    sizes = [value.numel() for value in values if isinstance(value, torch.Tensor)]
    return {"num_tensors": len(sizes), "num_parameters": sum(sizes)}


def _plain(value: Any) -> Any:
    """Return what JSON can hold: other keys than texts, and nan and inf, become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def weights_file(state: Any, state_data: bytes) -> tuple[str, bytes]:
    """Return name and content of the file of a state dict, given as a checkpoint holds it too.

    It is model.safetensors, with tied weights under each of their names, so that
    `load_state_dict` finds them all. Where safetensors can't hold the state it is model.pt, for
    `torch.load(..., weights_only=True)`: the data as they are.
    """
    reason = _unfit(state)
    if reason is None:
        try:
            from safetensors.torch import save  # noqa: PLC0415 - it may not be installed

            return "model.safetensors", save(_apart(state), metadata={"format": "pt"})
        except ImportError:
            reason = "the package safetensors is not installed here"
        except Exception as error:  # noqa: BLE001 - KeyError of a dtype, ValueError, its own
            reason = f"safetensors refuses it: {type(error).__name__}: {error}"
    text = "the model is exported as model.pt, to be loaded with torch.load(weights_only=True): %s"
    logger.warning(text, reason)
    return "model.pt", state_data


def _unfit(state: Any) -> str | None:
    if not isinstance(state, dict):
        return f"its state is a {type(state).__name__} and no dict"
    for name, value in state.items():
        if not isinstance(name, str) or not is_plain(value):
            kind = type(value).__name__
            return f"{name!r} in its state is a {kind} and no plain, dense tensor with a name"
    return None


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
