"""How a rank reads its batches of a table: threads decode the current and the next window."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from prefect_torch_ddp.data.fetching import seed_on_cpu
from prefect_torch_ddp.data.sampler import BatchKeys, GlobalBatches, RankShares, mix_seed
from prefect_torch_ddp.data.tables.form import Array
from prefect_torch_ddp.data.tables.rows import Rows
from prefect_torch_ddp.data.tables.windows import RowOrder, Window
from prefect_torch_ddp.data.tagged import Tagged
from prefect_torch_ddp.data.traits import Trait

NUM_THREADS = 2
"""Number of pieces of a window that are decoded at a time."""
UNSHUFFLED_ROWS = 65_536
"""Most rows of a window without shuffling, which then only serves to read ahead."""
_BATCH = 2


class DecodedPieces:
    """The rows of a window's pieces, which threads decode in the background."""

    def __init__(self, table: Rows, pieces: Sequence[int]) -> None:
        self._rows = table.room_for(pieces)
        self._decoded: dict[int, Future[None]] = {}
        self._waiting: deque[int] = deque()
        self._lock = threading.Lock()

    def begin(self, pieces: Iterable[int]) -> None:
        """Start to decode those of the pieces that aren't decoded yet, in this order."""
        with self._lock:
            new = [piece for piece in pieces if piece not in self._decoded]
            self._decoded.update((piece, Future()) for piece in new)
            self._waiting.extend(new)
        for _ in range(min(NUM_THREADS, len(new))):
            start_thread(self._work)

    def drop(self) -> None:
        """Decode no further pieces."""
        with self._lock:
            self._waiting.clear()

    def take(self, pieces: Iterable[int], rows: Array) -> list[torch.Tensor]:
        """Wait for these pieces; return the rows: a tensor [rows, ...] for each part of a batch."""
        wanted = list(pieces)
        self.begin(wanted)
        for piece in wanted:
            self._decoded[piece].result()
        return self._rows.take(rows)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or not threading.main_thread().is_alive():
                    return
                piece = self._waiting.popleft()
            try:
                self._rows.decode(piece)
            except BaseException as error:  # noqa: BLE001 - it belongs to who asks for the rows
                self._decoded[piece].set_exception(error)
            else:
                self._decoded[piece].set_result(None)


class TableReader(Dataset[Any]):
    """Fetches batches of a table by their positions in an epoch.

    The reader holds the current window and meanwhile decodes the next one, so at most two are in
    memory. In a training, the next epoch's first window follows an epoch's last one. Only pieces
    with rows of this rank's shares are decoded.

    Args:
        table: the rows.
        batches: the global batches, in positions.
        shares: the shares of each global batch that this rank holds.
        buffer: largest number of rows of a window.
        shuffle: shuffle the pieces, and the rows of each window; otherwise keep the files' order.
    """

    def __init__(
        self,
        table: Rows,
        batches: GlobalBatches,
        shares: RankShares,
        buffer: int,
        *,
        shuffle: bool,
    ) -> None:
        self._table = table
        self._seed = batches.seed
        self._shares = shares
        self._order = RowOrder(
            [piece.num_rows for piece in table.pieces],
            batches.seed,
            shuffle=shuffle,
            buffer=buffer if shuffle else min(buffer, UNSHUFFLED_ROWS),
            global_batch_size=batches.global_batch_size,
        )
        mixed = f", shuffled in windows of {buffer} rows" if shuffle else ""
        self.order = f"{len(table.pieces)} pieces of {table.layout}{mixed}"
        """Describes the order, for comparison with other ranks and with a checkpoint."""
        self._first_ids = np.array([piece.first_id for piece in table.pieces])
        self._process = os.getpid()
        self._pieces: dict[tuple[int, ...], DecodedPieces] = {}
        self._windows: dict[tuple[int, int], Future[Window]] = {}

    def __len__(self) -> int:
        return len(self._table)

    @property
    def traits(self) -> dict[str, list[Trait]]:
        """A few names and sizes of files: equal on all ranks."""
        return self._table.traits

    def __getitems__(self, keys: BatchKeys) -> Tagged:
        """Return the batch at these positions; a row's id is its number in the table."""
        epoch, positions, is_training, _ = keys
        if os.getpid() != self._process:  # the threads of the parent aren't here
            self._process, self._pieces, self._windows = os.getpid(), {}, {}
        ids: list[int] = []
        parts = []
        for number, where in self._order.segments(epoch, positions):
            self._begin_around(epoch, number, is_endless=is_training)
            found, taken_here = self._read(epoch, number, where)
            ids += found
            parts.append(taken_here)
        if get_worker_info() is not None or self._shares.is_virtual:
            # For what collate_fn draws: as for datasets that read batches at once.
            seed_on_cpu(mix_seed(self._seed, epoch, positions[0], _BATCH))
        batch = self._table.form.batch(parts)
        return Tagged(tuple(ids), batch, is_training=is_training)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the threads' results, which belong to this process."""
        return self.__dict__ | {"_pieces": {}, "_windows": {}}

    def _read(self, epoch: int, number: int, where: slice) -> tuple[list[int], list[torch.Tensor]]:
        """Return ids and rows of a window's positions."""
        window = self._windows[epoch, number].result()
        rows = window.rows[where]
        places = window.pieces_of(rows)
        numbers = np.array(window.pieces)
        found = (self._first_ids[numbers[places]] + rows - window.starts[places]).tolist()
        pieces = numbers[np.unique(places)].tolist()
        return found, self._pieces[window.pieces].take(pieces, rows)

    def _begin(self, epoch: int, number: int) -> None:
        """Start to load a window, if not yet started: its order, and the pieces needed here."""
        if (epoch, number) in self._windows:
            return
        pieces = self._order.pieces(epoch, number)
        assert pieces is not None
        # A small table is one window, the same in each epoch: it stays decoded.
        if pieces not in self._pieces:
            self._pieces[pieces] = DecodedPieces(self._table, pieces)
        window: Future[Window] = Future()
        self._windows[epoch, number] = window
        start_thread(self._plan, epoch, number, window, self._pieces[pieces])

    def _plan(
        self, epoch: int, number: int, planned: "Future[Window]", decoded: DecodedPieces
    ) -> None:
        try:
            window = self._order.window(epoch, number)
            decoded.begin(self._order.pieces_for(window, self._shares))
        except BaseException as error:  # noqa: BLE001 - it belongs to who asks for the rows
            planned.set_exception(error)
        else:
            planned.set_result(window)

    def _begin_around(self, epoch: int, number: int, *, is_endless: bool) -> None:
        """Start to load a window and the following one; drop all others."""
        following = (epoch, number + 1)
        if self._order.pieces(*following) is None:
            following = (epoch + 1, 0)
        kept = [(epoch, number)]
        if following[0] == epoch or is_endless:
            kept.append(following)
        if kept == list(self._windows):
            return
        for key in [key for key in self._windows if key not in kept]:
            del self._windows[key]
        still = {self._order.pieces(*key) for key in kept}
        for pieces in [pieces for pieces in self._pieces if pieces not in still]:
            self._pieces.pop(pieces).drop()
        for key in kept:
            self._begin(*key)


def start_thread(work: Callable[..., None], *args: Any) -> None:
    """Start a thread that does some work and ends.

    A pool couldn't be used after a fork. A daemon thread would make a process abort if it ended
    while pyarrow decodes.
    """
    threading.Thread(target=work, args=args, name="ptd-table").start()
