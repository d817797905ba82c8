"""What a batch of samples of arrays is."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from prefect_torch_ddp.data.arrays.variables import Array

INDEX = "index"
"""The name of the samples' numbers in a batch."""


@dataclass(frozen=True)
class ArrayForm:
    """What a batch is: a tensor of the only array, or a dict of tensors; perhaps with numbers."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of a sample."""
    is_single: bool
    is_numbered: bool

    @property
    def row_bytes(self) -> int:
        """The bytes of a sample in memory."""
        sizes = zip(self.dtypes, self.shapes, strict=True)
        return sum(np.dtype(dtype).itemsize * prod(shape) for dtype, shape in sizes)

    def new_arrays(self, num_rows: int) -> list[Array]:
        """Return room for so many samples: an array [samples, ...] for each variable."""
        like = zip(self.dtypes, self.shapes, strict=True)
        arrays = [np.empty((num_rows, *shape), dtype) for dtype, shape in like]
        return [*arrays, np.empty(num_rows, "int64")] if self.is_numbered else arrays

    def batch(self, parts: Sequence[Sequence[torch.Tensor]]) -> Any:
        """Return a batch of the samples' tensors; several parts are joined."""
        joins = len(parts) > 1
        whole = [torch.cat(each) if joins else each[0] for each in zip(*parts, strict=True)]
        if self.is_single:
            return tuple(whole) if self.is_numbered else whole[0]
        names = (*self.names, INDEX) if self.is_numbered else self.names
        return dict(zip(names, whole, strict=True))
