"""A table as a dataset of `ctx.loader`: read in windows, or by any row from a local copy."""

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from prefect_torch_ddp.data.fetching import HasCategories, WholeBatches
from prefect_torch_ddp.data.sampler import GlobalBatches, RankShares
from prefect_torch_ddp.data.shards import ReadByPosition
from prefect_torch_ddp.data.tables.form import Batch
from prefect_torch_ddp.data.tables.local_copy import LocalCopy
from prefect_torch_ddp.data.tables.pieces import TablePieces
from prefect_torch_ddp.data.tables.reader import TableReader
from prefect_torch_ddp.errors import InvalidParamsError, StorageError


class Table(ReadByPosition, HasCategories):
    """Rows of Parquet files for `ctx.loader`, read window by window in an exact order.

    Args:
        rows: the rows of the files.
        shuffle_buffer: largest number of rows that are shuffled together.
    """

    def __init__(self, rows: TablePieces, shuffle_buffer: int) -> None:
        self.rows = rows
        self.shuffle_buffer = shuffle_buffer

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """The values of each category by column name; a value's code is its position."""
        return {name: each.values for name, each in self.rows.columns.items() if each.values}

    @property
    def in_order(self) -> tuple[str, ...]:
        """The features and targets, as they lie in x and y; none if batches are dicts."""
        return self.rows.form.names if self.rows.form.has_features else ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, _: object) -> NoReturn:
        msg = (
            "a table can't be read row by row, nor be used in a Subset: choose rows with "
            "filters= of table(), such as filters=[('split', '==', 'train')], or pass "
            "local_copy=True, which decodes the rows to a local disk"
        )
        raise InvalidParamsError(msg)

    def reader(self, batches: GlobalBatches, shares: RankShares, *, shuffle: bool) -> TableReader:
        """Return the reader of a rank's shares of the global batches."""
        return TableReader(self.rows, batches, shares, self.shuffle_buffer, shuffle=shuffle)


class CopiedTable(WholeBatches, HasCategories):
    """Rows of Parquet files in a local copy: a map-style dataset, any row at any time.

    Args:
        copy: the rows.
    """

    def __init__(self, copy: LocalCopy) -> None:
        self._copy = copy
        self.blocks = copy.blocks
        self.meaning = copy.form.meaning(copy.categories)

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """The values of each category by column name; a value's code is its position."""
        return dict(self._copy.categories)

    @property
    def in_order(self) -> tuple[str, ...]:
        """The features and targets, as they lie in x and y; none if batches are dicts."""
        return tuple(self._copy.form.names) if self._copy.form.has_features else ()

    @property
    def layout(self) -> str:
        """Names the table's files."""
        return self._copy.layout

    @property
    def folder(self) -> Path:
        """Where the copy is."""
        return self._copy.folder

    def __len__(self) -> int:
        return self._copy.num_rows

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples, of which torch's default_collate makes what `batch_of` returns."""
        return self._copy.form.samples(self.batch_of(indices))

    def batch_of(self, indices: Sequence[int]) -> Batch:
        """Return the batch of these rows, copied."""
        rows = np.asarray(indices)
        taken = [torch.from_numpy(block.take(rows, axis=0)) for block in self.blocks]
        return self._copy.form.batch([taken])

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.folder,)


def _reopened(folder: Path) -> CopiedTable:
    """Open a copy in another process, such as a spawned worker of a loader."""
    copy = LocalCopy.at(folder)
    if copy is None:
        msg = f"there is no copy of a table in {folder}: call table() in the process that reads it"
        raise StorageError(msg)
    return CopiedTable(copy)
