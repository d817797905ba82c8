"""From states to bytes and back: staging, serialising, and loading that never runs code.

Also the state of a rank's random generators: Python's, NumPy's, torch's and CUDA's.
"""

import io
import random
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any, BinaryIO

import numpy as np
import torch

from prefect_torch_ddp.errors import InvalidParamsError

_Layout = tuple[torch.Size, torch.dtype, tuple[int, ...], bool]


def to_bytes(state: Any) -> bytes:
    """Serialise a state; plain `torch.load(..., weights_only=True)` reads it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the state, its tensors on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def from_file(file: BinaryIO) -> Any:
    """Return the state of an open file, its tensors mapped: they are read when they are used."""
    # By the descriptor, since another file may have the name by now.
    path = f"/proc/self/fd/{file.fileno()}"
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


class Serializer:
    """Serialises one state at a time into memory that it keeps: fresh memory costs most."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()

    def to_view(self, state: Any) -> memoryview:
        """Return what `to_bytes` returns; drop it before the next call, or lose the memory."""
        self._buffer.seek(0)
        try:
            self._buffer.write(b"")
        except BufferError:  # somebody still holds the last view, such as a traceback
            self._buffer = io.BytesIO()
        torch.save(state, self._buffer)
        return self._buffer.getbuffer()[: self._buffer.tell()].toreadonly()


class Staging:
    """Copies states to the CPU during a step, so that the slow part happens beside the next.

    The buffers of the previous copy are used again, so that one must not be needed any more.
    """

    def __init__(self) -> None:
        self._idle: dict[_Layout, list[torch.Tensor]] = {}
        self._used: list[tuple[_Layout, torch.Tensor]] = []
        self._copied: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Take all buffers back; those that the previous copy didn't need are freed."""
        self._idle = {}
        for layout, buffer in self._used:
            self._idle.setdefault(layout, []).append(buffer)
        self._used = []

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Return the state on the CPU; copies from a GPU may be under way until `wait`."""
        copies: dict[tuple[Any, ...], torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if not is_plain(tensor):
                return tensor.detach().to("cpu", copy=True)
            # Tied weights are stored once, as torch.save does.
            place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() == 0 or place not in copies:
                buffer = self._buffer_for(tensor)
                copies[place] = buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            return copies[place]

        result = map_tensors(state, copied)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied.append(event)
        return result

    def wait(self) -> None:
        """Wait until all copies have arrived."""
        while self._copied:
            self._copied.pop().synchronize()

    def _buffer_for(self, tensor: torch.Tensor) -> torch.Tensor:
        layout = (tensor.shape, tensor.dtype, tensor.stride(), tensor.is_cuda)
        if idle := self._idle.get(layout):
            buffer = idle.pop()
        else:
            buffer = torch.empty_like(
                tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda
            )
        self._used.append((layout, buffer))
        return buffer.detach()


def is_plain(value: Any) -> bool:
    """Tell whether a value is a dense tensor of no subclass."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided


def has_buffers(item: Any) -> bool:
    """Tell whether an object is a module with buffers, such as BatchNorm's statistics."""
    return hasattr(item, "buffers") and any(True for _ in item.buffers())


def map_tensors(state: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a nest of dicts, lists and tuples, each tensor replaced and all else copied deeply.

    NumPy's numbers become Python's, which is all that `torch.load(weights_only=True)` takes.
    """
    if isinstance(state, torch.Tensor):
        return replace(state)
    if isinstance(state, np.generic):
        return state.item()
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
    """Refuse a state that couldn't be read back, by InvalidParamsError with place and type.

    Tensors count as empty, so it costs little.
    """
    error = _refusal(state)
    if error is None:
        return
    place, part = "", state
    while True:  # to the innermost part that is refused
        is_sequence = isinstance(part, list | tuple)
        items = part.items() if isinstance(part, dict) else enumerate(part if is_sequence else ())
        refused = ((key, value) for key, value in items if _refusal(value) is not None)
        if (found := next(refused, None)) is None:
            break
        place, part = f"{place}[{found[0]!r}]", found[1]
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    msg = (
        f"the state of the tracked object {name!r} can't be read back with "
        f"torch.load(weights_only=True): state_dict(){place} is a {kind}; "
        "it should hold tensors, numbers, texts, lists and plain dicts"
    )
    raise InvalidParamsError(msg) from error


def _refusal(state: Any) -> Exception | None:
    try:
        from_bytes(to_bytes(map_tensors(state, lambda tensor: tensor.new_empty(0))))
    except Exception as error:  # noqa: BLE001 - pickle and torch refuse in every way
        return error
    return None


def capture_generators() -> dict[str, Any]:
    """Return the state of all global generators, as tensors and plain values."""
    # The global one is what user code draws from.
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    numpy["state"] |= {"key": numpy["state"]["key"].tolist()}
    state = {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Only this rank's device: asking for the others would make a context on each.
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Put the generators back; a device that either side lacks is left alone."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
