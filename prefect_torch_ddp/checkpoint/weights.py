"""Owns how a model's state becomes a file that plain PyTorch loads on any machine."""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from prefect_torch_ddp.checkpoint.serial import from_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightsFile:
    """A file of weights: plain names, without `module.`."""

    name: str
    """model.safetensors; or model.pt, for `torch.load(..., weights_only=True)`, where safetensors can't hold the state."""
    data: bytes
    num_tensors: int
    num_parameters: int
    """Numbers in all tensors together, buffers included; tied weights count as often as they are named."""


def weights_file(state_data: bytes) -> WeightsFile:
    """Make the file of a state dict as a checkpoint holds it.

    Tied weights are written under each of their names, so that `load_state_dict` finds them all.

    Args:
        state_data: what `serial.to_bytes` made of the state dict; it is the file itself where safetensors can't hold the state.
    """
    state = from_bytes(state_data)
    values = state.values() if isinstance(state, dict) else ()
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = len(tensors), sum(tensor.numel() for tensor in tensors)
    try:
        return WeightsFile("model.safetensors", _safetensors_of(state), *sizes)
    except _UnfitError as error:
        logger.warning("the model is left as model.pt, to be loaded with torch.load(weights_only=True): %s", error)
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
    except Exception as error:  # it refuses in every way: KeyError of a dtype, ValueError, an error of its own
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
