"""Owns the CPU buffers into which a state is copied during the step, so that the slow part can
happen beside the next steps.
"""

from typing import Any

import torch

from prefect_torch_ddp.checkpoint.serial import map_tensors

_Layout = tuple[torch.Size, torch.dtype, tuple[int, ...], bool]


class Staging:
    """Copies states of tensors; the buffers of the last time are used again, so the last copy
    must not be needed any more.
    """

    def __init__(self) -> None:
        self._idle: dict[_Layout, list[torch.Tensor]] = {}
        self._used: list[tuple[_Layout, torch.Tensor]] = []
        self._copied: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Take all buffers back; those that the last copy didn't need are freed."""
        self._idle = {}
        for layout, buffer in self._used:
            self._idle.setdefault(layout, []).append(buffer)
        self._used = []

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Return the state with its tensors copied to the CPU; copies from a GPU may still be
        under way: see `wait`.
        """
        copies: dict[tuple[Any, ...], torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if (
                type(tensor) not in (torch.Tensor, torch.nn.Parameter)
                or tensor.layout is not torch.strided
            ):
                return tensor.detach().to("cpu", copy=True)
            # Tied weights are stored once, as torch.save does.
            place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() == 0 or place not in copies:
                copies[place] = self._buffer_for(tensor).copy_(
                    tensor.detach(), non_blocking=tensor.is_cuda
                )
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
        idle = self._idle.get(layout)
        buffer = (
            idle.pop()
            if idle
            else torch.empty_like(
                tensor, device="cpu", requires_grad=False, pin_memory=tensor.is_cuda
            )
        )
        self._used.append((layout, buffer))
        return buffer.detach()


def has_buffers(item: Any) -> bool:
    """Tell whether an object is a module with buffers, such as BatchNorm's statistics."""
    return hasattr(item, "buffers") and any(True for _ in item.buffers())
