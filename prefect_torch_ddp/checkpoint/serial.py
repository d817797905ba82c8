"""Owns how a state becomes bytes and back; nothing that is read from a storage can run code."""

import hashlib
import io
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch

from prefect_torch_ddp.errors import CheckpointError


def to_bytes(state: Any) -> bytes:
    """Serialise a state; plain `torch.load(..., weights_only=True)` reads it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the state, its tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def sha256_of(data: bytes) -> str:
    """Return the digest in hex."""
    return hashlib.sha256(data).hexdigest()


def map_tensors(state: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a nest of dicts, lists and tuples, each tensor replaced; everything else is copied deeply."""
    if isinstance(state, torch.Tensor):
        return replace(state)
    if isinstance(state, dict):
        result = copy(state)  # keeps the class and its attributes, such as a module's _metadata
        for key, value in state.items():
            result[key] = map_tensors(value, replace)
        return result
    if isinstance(state, list | tuple):
        values = [map_tensors(value, replace) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else type(state)(values)
    return deepcopy(state)


def check_loadable(name: str, state: Any) -> None:
    """Refuse a state that couldn't be read back; tensors count as empty, so it costs little.

    Raises:
        CheckpointError: names the tracked object.
    """
    try:
        from_bytes(to_bytes(map_tensors(state, lambda tensor: tensor.new_empty(0))))
    except Exception as error:  # pickle and torch refuse in every way
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        msg = (
            f"the state of the tracked object {name!r} can't be read back with torch.load(weights_only=True): {reason}; "
            "its state_dict() should hold tensors, numbers, texts, lists and plain dicts"
        )
        raise CheckpointError(msg) from error
