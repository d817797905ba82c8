"""The order of a table's rows: pieces of files shuffled, then rows within windows of several."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch

from prefect_torch_ddp.data.sampler import RankShares, mix_seed, share_range

_PIECES, _ROWS = range(2)
Numbers: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Window:
    """A run of an epoch's positions, whose rows come from a few pieces."""

    first: int
    """Position in the epoch of its first row."""
    pieces: tuple[int, ...]
    """Numbers of the pieces, sorted: their rows lie in this order."""
    starts: Numbers
    """Where the rows of each piece begin, and where the last ones end: int64 [pieces + 1]."""
    rows: Numbers
    """The row at each position, counted in the order of the pieces: int64 [rows]."""

    def pieces_of(self, rows: Numbers) -> Numbers:
        """Return in which piece of `pieces` each row is, as its index there."""
        return np.searchsorted(self.starts, rows, side="right") - 1


class RowOrder:
    """The order of all rows in each epoch; the number of ranks has no part in it.

    With `shuffle` the pieces come in an order of their own each epoch. That is cut into windows:
    as many pieces as have at most `buffer` rows together, at least one. The rows of a window are
    shuffled. Within a global batch, whose gradient doesn't depend on it, rows are then sorted by
    piece: so the contiguous share of a rank lies in few pieces, and the rank decodes no others.

    Args:
        sizes: rows of each piece, none of them 0.
        seed: decides the order of every epoch.
        shuffle: else the rows come as they lie.
        buffer: most rows of a window.
        global_batch_size: rows of a global batch.
    """

    def __init__(
        self, sizes: Sequence[int], seed: int, *, shuffle: bool, buffer: int, global_batch_size: int
    ) -> None:
        self.num_rows = sum(sizes)
        self._sizes = sizes
        self._seed = seed
        self._shuffle = shuffle
        self._buffer = buffer
        self._batch_size = global_batch_size
        self._epochs: dict[int, tuple[list[tuple[int, ...]], list[int]]] = {}

    def segments(self, epoch: int, positions: Sequence[int]) -> Iterator[tuple[int, slice]]:
        """Yield the windows that contiguous positions lie in, and which positions of each."""
        _, starts = self._windows(epoch)
        position, end = positions[0], positions[-1] + 1
        while position < end:
            number = bisect_right(starts, position) - 1
            start = starts[number]
            until = starts[number + 1] if number + 1 < len(starts) else self.num_rows
            last = min(end, until)
            yield number, slice(position - start, last - start)
            position = last

    def pieces(self, epoch: int, number: int) -> tuple[int, ...] | None:
        """Return the pieces of an epoch's window, sorted; None after the last window."""
        windows, _ = self._windows(epoch)
        return windows[number] if number < len(windows) else None

    def window(self, epoch: int, number: int) -> Window:
        """Return an epoch's window with the order of its rows."""
        windows, firsts = self._windows(epoch)
        pieces, first = windows[number], firsts[number]
        starts = np.array([0, *accumulate(self._sizes[piece] for piece in pieces)])
        num = int(starts[-1])
        rows: Numbers = np.arange(num)
        if self._shuffle:
            generator = torch.Generator(device="cpu")
            generator.manual_seed(mix_seed(self._seed, epoch, number, _ROWS))
            mixed = torch.randperm(num, generator=generator, device="cpu").numpy()
            batch = (rows + first) // self._batch_size - first // self._batch_size
            rows = np.sort(batch * num + mixed) % num
        return Window(first, pieces, starts, rows)

    def pieces_for(self, window: Window, shares: RankShares) -> list[int]:
        """Return the pieces of a window that a rank's shares of the batches have rows of."""
        positions = np.arange(len(window.rows)) + window.first
        offsets = positions % self._batch_size
        full, tail = self._batch_size, self.num_rows % self._batch_size
        is_own = _is_own(offsets, full, shares)
        if tail:
            in_tail = positions >= self.num_rows - tail
            is_own = np.where(in_tail, _is_own(offsets, tail, shares), is_own)
        found = np.unique(window.pieces_of(window.rows[is_own]))
        return [window.pieces[i] for i in found.tolist()]

    def _windows(self, epoch: int) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return the pieces of each of an epoch's windows, and the position where each begins."""
        # Read by threads as well, which at worst make it twice.
        known = self._epochs.get(epoch)
        if known is None:
            windows: list[list[int]] = []
            rows = self._buffer + 1
            for piece in self._pieces_in_order(epoch):
                rows += self._sizes[piece]
                if rows > self._buffer:
                    windows.append([])
                    rows = self._sizes[piece]
                windows[-1].append(piece)
            sizes = (sum(self._sizes[piece] for piece in window) for window in windows)
            starts = list(accumulate(sizes, initial=0))[:-1]
            known = [tuple(sorted(each)) for each in windows], starts
            # Of the next epoch too, with whose first window a rank begins before this one ends.
            self._epochs = {**dict(list(self._epochs.items())[-1:]), epoch: known}
        return known

    def _pieces_in_order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._sizes)))
        generator = torch.Generator(device="cpu")
        generator.manual_seed(mix_seed(self._seed, epoch, 0, _PIECES))
        num = len(self._sizes)
        order: list[int] = torch.randperm(num, generator=generator, device="cpu").tolist()
        return order


def _is_own(offsets: Numbers, num_global: int, shares: RankShares) -> Numbers:
    """Tell which offsets in a global batch of this size are in a rank's shares."""
    first, last = (
        share_range(num_global, number, shares.num_shares)
        for number in (shares.own[0], shares.own[-1])
    )
    is_own: Numbers = (offsets >= first.start) & (offsets < last.stop)
    return is_own
