"""A model's buffers, such as running statistics, on their way from rank 0 to the others."""

import operator
from collections import defaultdict

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

MOST_BYTES = 2**20
"""Beyond them one message saves nothing that counts, and takes another copy of the buffers."""


def _is_plain(buffer: torch.Tensor) -> bool:
    # Of a lazy conjugate there is no view as bytes.
    return buffer.device.type == "cpu" and not (buffer.is_conj() or buffer.is_neg())


def _layout(buffers: list[torch.Tensor]) -> list[tuple[torch.dtype, int]]:
    return [(buffer.dtype, buffer.nbytes) for buffer in buffers]


class BufferMessage:
    """Buffers that go as one message of bytes.

    DDP makes one for each dtype, and each wakes some threads on every rank: in a step of 10 ms on
    two ranks that share two cores the second one of a BatchNorm takes 2 to 4 %.
    """

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        """Lay the message out."""
        self._buffers, self._layout = buffers, _layout(buffers)
        alike: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for buffer in sorted(buffers, key=lambda buffer: -buffer.itemsize):  # keeps all aligned
            alike[buffer.dtype].append(buffer)
        self._groups = list(alike.values())
        self._sizes = [sum(buffer.nbytes for buffer in group) for group in self._groups]
        self._num_bytes = sum(self._sizes)
        self.is_worth_it = self._num_bytes <= MOST_BYTES and all(map(_is_plain, buffers))

    def is_of(self, buffers: list[torch.Tensor]) -> bool:
        """Tell whether these are the same as they were: a model may replace or resize some."""
        known = self._buffers
        are_known = len(buffers) == len(known) and all(map(operator.is_, buffers, known))
        return are_known and _layout(buffers) == self._layout

    @torch.no_grad()
    def broadcast(self, group: dist.ProcessGroup) -> None:
        """Take rank 0's values; every rank must call it."""
        if group.rank() == 0:
            flats = map(_flatten_dense_tensors, self._groups)
            message = torch.cat([flat.view(torch.uint8) for flat in flats])
            group.broadcast(message, 0).wait()
            return
        message = torch.empty(self._num_bytes, dtype=torch.uint8, device="cpu")
        group.broadcast(message, 0).wait()
        # As DDP does: a graph that is kept may have saved a buffer.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self._buffers)):  # noqa: SLF001
            parts = message.split_with_sizes(self._sizes)
            for alike, part in zip(self._groups, parts, strict=True):
                flat = part.view(alike[0].dtype)
                values = _unflatten_dense_tensors(flat, alike)  # type: ignore[no-untyped-call]
                torch._foreach_copy_(alike, values)
