"""Arrays as a dataset of `ctx.loader`."""

from typing import Any

from prefect_torch_ddp.data.arrays.pieces import ArrayPieces
from prefect_torch_ddp.data.sampler import GlobalBatches, RankShares
from prefect_torch_ddp.data.shards import ReadByPosition
from prefect_torch_ddp.data.tables.reader import TableReader
from prefect_torch_ddp.errors import InvalidParamsError


class Arrays(ReadByPosition):
    """Samples of arrays for `ctx.loader`, which are read by window and in an exact order.

    Args:
        samples: of the arrays.
        shuffle_buffer: most samples that are shuffled among one another.
    """

    def __init__(self, samples: ArrayPieces, shuffle_buffer: int) -> None:
        self.samples = samples
        self.shuffle_buffer = shuffle_buffer

    @property
    def left_out(self) -> dict[str, int]:
        """The positions at the end of a dimension that are in no sample, if there are any."""
        return {axis.name: axis.left_out for axis in self.samples.axes if axis.left_out}

    @property
    def scales(self) -> dict[str, tuple[float, float]]:
        """The (mean, std) by which each variable is normalised; a std of 0 counts as 1."""
        found = self.samples.found.variables
        return {each.name: (each.scale.mean, each.scale.std) for each in found if each.scale}

    def __len__(self) -> int:
        return len(self.samples)

    def where(self, index: int) -> dict[str, Any]:
        """Return where a sample lies, by dimension.

        Args:
            index: the number of the sample, as in a ledger or, with `numbered=True`, a batch.

        Returns:
            For a dimension that a sample has, its coordinates there, an array [extent]; for
            another one that samples lie along, the one coordinate. If a dimension has no
            coordinates, its positions.

        Raises:
            IndexError: there is no such sample.
        """
        if not 0 <= int(index) < len(self):
            msg = f"there is no sample {index}: there are {len(self)}"
            raise IndexError(msg)
        return self.samples.where(int(index))

    def __getitem__(self, _: object) -> Any:
        msg = (
            "single samples of arrays can't be read, and they can't be in a Subset: choose them by "
            "select= of array(), such as select={'time': slice('2000', '2015')}"
        )
        raise InvalidParamsError(msg)

    def reader(self, batches: GlobalBatches, shares: RankShares, *, shuffle: bool) -> TableReader:
        """Return what reads a rank's shares of the global batches."""
        return TableReader(self.samples, batches, shares, self.shuffle_buffer, shuffle=shuffle)
