"""Owns how a state becomes bytes and back; nothing that is read from a storage can run code.

Owns the state of a rank's random generators: python's, numpy's, torch's and CUDA's.
"""

import io
import random
from collections.abc import Callable
from copy import copy, deepcopy
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch

from prefect_torch_ddp.errors import CheckpointError


def to_bytes(state: Any) -> bytes:
    """Serialise a state; plain `torch.load(..., weights_only=True)` reads it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes | memoryview) -> Any:
    """Return the state, its tensors on the CPU."""
    file = cast("IO[bytes]", _View(data)) if isinstance(data, memoryview) else io.BytesIO(data)
    return torch.load(file, map_location="cpu", weights_only=True)


def from_file(file: BinaryIO) -> Any:
    """Return the state of an open file, its tensors on the CPU and mapped: the file isn't read
    before they are.
    """
    # By the descriptor, since another file may have the name by now.
    return torch.load(
        f"/proc/self/fd/{file.fileno()}", map_location="cpu", mmap=True, weights_only=True
    )


class _View(io.RawIOBase):
    """A file to read that, other than BytesIO, makes no copy of what isn't `bytes`."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[
            whence
        ] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


class Serializer:
    """Serialises one state at a time into memory that it keeps: fresh memory costs more than
    all the rest.
    """

    def __init__(self) -> None:
        """Take no memory yet; it grows to the largest state."""
        self._kept = memoryview(bytearray())

    def to_view(self, state: Any) -> memoryview:
        """Return what `to_bytes` returns, valid until the next call."""
        with _KeptFile(self._kept) as file:
            torch.save(state, cast("IO[bytes]", file))
            self._kept = file.memory
            return self._kept[: file.tell()].toreadonly()


class _KeptFile(io.RawIOBase):
    """A file that is written from the beginning, into memory that outlives it."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__()
        self.memory = memory
        self._end = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._end

    def write(self, data: Any) -> int:
        part = memoryview(data).cast("B")
        end = self._end + len(part)
        if end > len(self.memory):
            # Another one: who still looks at the old one, such as a traceback, keeps that.
            larger = memoryview(bytearray(max(end, 3 * len(self.memory) // 2)))
            larger[: self._end] = self.memory[: self._end]
            self.memory = larger
        self.memory[self._end : end] = part
        self._end = end
        return len(part)


def map_tensors(state: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a nest of dicts, lists and tuples, each tensor replaced; everything else is copied
    deeply.
    """
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


def capture_generators() -> dict[str, Any]:
    """Return the state of all global generators, as tensors and plain values."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64, device="cpu"),
            "gauss": gauss,
        },
        "numpy": {
            "keys": torch.tensor(np.asarray(keys).astype(np.int64), device="cpu"),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Only this rank's device: asking for the others would make a context on each.
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Put the generators back; a device that either side lacks is left alone."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
