"""The samples of some pieces in memory: cut from the values only when a batch takes them."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from prefect_torch_ddp.data.arrays.axes import ArrayPiece
from prefect_torch_ddp.data.arrays.form import ArrayForm
from prefect_torch_ddp.data.arrays.variables import Array


class DecodedSamples:
    """The decoded samples of some pieces.

    It holds the values as they were read and no copy of each sample: values in which windows
    overlap are in memory once, and a sample is copied once, into its batch.

    Args:
        form: of the batches.
        pieces: all pieces.
        numbers: the numbers of those that are held, in the order of their samples.
        read: reads a piece; returns a view of each variable's samples.
    """

    def __init__(
        self,
        form: ArrayForm,
        pieces: Sequence[ArrayPiece],
        numbers: Sequence[int],
        read: Callable[[int], list[Array]],
    ) -> None:
        self._form, self._pieces, self._numbers, self._read = form, pieces, numbers, read
        self._starts = np.array([*accumulate((pieces[i].num_rows for i in numbers), initial=0)])
        self._views: dict[int, list[Array]] = {}

    def decode(self, number: int) -> None:
        """Read a piece; raises as `ArrayPieces.decode` does."""
        self._views[number] = self._read(number)

    def take(self, rows: Array) -> list[torch.Tensor]:
        """Return samples of pieces that were read, copied: a tensor [rows, ...] by variable."""
        batch = self._form.new_arrays(len(rows))
        bounds = np.searchsorted(rows, self._starts)
        for i in np.flatnonzero(np.diff(bounds)).tolist():
            where, number = slice(bounds[i], bounds[i + 1]), self._numbers[i]
            piece = self._pieces[number]
            own = rows[where] - self._starts[i]
            indices = np.unravel_index(own, tuple(map(len, piece.blocks)))
            for view, room in zip(self._views[number], batch, strict=False):
                _copy(view, indices, room[where])
            if self._form.is_numbered:
                batch[-1][where] = own + piece.first_id
        return [torch.from_numpy(array) for array in batch]


def _copy(view: Array, indices: Sequence[Array], room: Array) -> None:
    """Copy samples.

    Args:
        view: the samples [along each axis, or 1 if the variable lacks it; ...].
        indices: of the samples along each axis.
        room: where they are copied to [samples, ...].
    """
    if len(indices) == 1 and view.shape[0] > 1 and view.flags.c_contiguous:
        np.take(view, indices[0], axis=0, out=room, mode="clip")  # "raise" would copy twice
        return
    along = [
        [0] * len(room) if size == 1 else along_axis.tolist()
        for size, along_axis in zip(view.shape, indices, strict=False)
    ]
    for i, at in enumerate(zip(*along, strict=True)):
        room[i] = view[at]
