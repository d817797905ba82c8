"""A table as a dataset of `ctx.loader`."""

from typing import Any

from prefect_torch_ddp.data.sampler import GlobalBatches, RankShares
from prefect_torch_ddp.data.shards import ReadByPosition
from prefect_torch_ddp.data.tables.pieces import TablePieces
from prefect_torch_ddp.data.tables.reader import TableReader
from prefect_torch_ddp.errors import InvalidParamsError


class Table(ReadByPosition):
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

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, _: object) -> Any:
        msg = (
            "a table can't be read row by row, nor be used in a Subset: choose rows with "
            "filters= of table(), such as filters=[('split', '==', 'train')]"
        )
        raise InvalidParamsError(msg)

    def reader(self, batches: GlobalBatches, shares: RankShares, *, shuffle: bool) -> TableReader:
        """Return the reader of a rank's shares of the global batches."""
        return TableReader(self.rows, batches, shares, self.shuffle_buffer, shuffle=shuffle)
