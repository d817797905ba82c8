"""Owns how a rank's return value is sent home."""

import io
from typing import Any

import cloudpickle
import torch


class UnpicklableValueError(TypeError):
    """A rank returned something that can't be sent home."""


class _HomePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def reducer_override(self, obj: Any) -> Any:
        # The caller may have no GPU, and must not be handed memory of one that a dead process held.
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return obj.detach().cpu().__reduce_ex__(4)  # type: ignore[no-untyped-call]
        return super().reducer_override(obj)


def pickle_value(value: Any, rank: int) -> bytes:
    """Pickle what a rank returned, tensors moved to the CPU.

    Raises:
        UnpicklableValueError: names the rank and the type.
    """
    buffer = io.BytesIO()
    try:
        _HomePickler(buffer).dump(value)
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        msg = f"rank {rank} returned a value of type {kind} that can't be pickled: {error}; return plain data"
        raise UnpicklableValueError(msg) from error
    return buffer.getvalue()
