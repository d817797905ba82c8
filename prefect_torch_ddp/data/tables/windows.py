"""The order of a table's rows: pieces are shuffled, then the rows within windows of pieces."""

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
    """Consecutive positions of an epoch whose rows come from a few pieces."""

    first: int
    """Position in the epoch of its first row."""
    pieces: tuple[int, ...]
    """Numbers of the pieces, sorted; their rows are stored in this order."""
    starts: Numbers
    """The index of each piece's first row, and the end of the last one: int64 [pieces + 1]."""
    rows: Numbers
    """The row at each position, counted in the order of the pieces: int64 [rows]."""

    def pieces_of(self, rows: Numbers) -> Numbers:
        """Return the index in `pieces` of the piece that each row is in: int64 [rows]."""
        return np.searchsorted(self.starts, rows, side="right") - 1


class RowOrder:
    """The order of all rows in each epoch, which doesn't depend on the number of ranks.

    With `shuffle`, each epoch shuffles the pieces and cuts them into windows. A window has as many
    pieces as have at most `buffer` rows together, and at least one. The rows of a window are then
    shuffled. Finally the rows of each global batch are sorted by piece, which doesn't change its
    gradient: a rank's contiguous share then lies in few pieces, and the rank decodes only those.

    Args:
        sizes: number of rows of each piece, at least 1.
        seed: determines the order of every epoch.
        shuffle: shuffle; otherwise the rows keep the files' order.
        buffer: largest number of rows of a window.
        global_batch_size: number of rows of a global batch.
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
        """Yield the number of each window that has some of these positions, and its slice."""
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
        """Return the pieces of a window that have rows of a rank's shares."""
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
        """Return the pieces of each window of an epoch, and the first position of each window."""
        # Threads call it too; at worst two of them compute the same.
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
            # Two epochs are kept: a rank starts the next epoch's first window before this one ends.
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
    """Return which offsets in a global batch of this size are in a rank's shares, as booleans."""
    first, last = (
        share_range(num_global, number, shares.num_shares)
        for number in (shares.own[0], shares.own[-1])
    )
    is_own: Numbers = (offsets >= first.start) & (offsets < last.stop)
    return is_own
