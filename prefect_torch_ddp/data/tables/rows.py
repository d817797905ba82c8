"""What the reader of windows asks of a dataset's rows: a table's, or the samples of arrays."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from prefect_torch_ddp.data.traits import Trait


class RowsForm(Protocol):
    """What a batch is made of rows."""

    def batch(self, parts: Sequence[Sequence[torch.Tensor]]) -> Any:
        """Return a batch of the rows' tensors, one for each array; several parts are joined."""
        ...


class RowsPiece(Protocol):
    """Rows that are decoded at once."""

    @property
    def num_rows(self) -> int:
        """At least 1."""
        ...

    @property
    def first_id(self) -> int:
        """The number of its first row in the dataset."""
        ...


class DecodedRows(Protocol):
    """The decoded rows of some pieces."""

    def decode(self, number: int) -> None:
        """Decode one of the pieces; several threads call it, for one piece each."""
        ...

    def take(self, rows: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """Return rows of decoded pieces, copied: a tensor [rows, ...] for each part of a batch.

        Args:
            rows: counted from the first row of the first piece on; in ascending order.
        """
        ...


class Rows(Protocol):
    """All rows of a dataset, in pieces."""

    @property
    def pieces(self) -> Sequence[RowsPiece]:
        """In their order."""
        ...

    @property
    def form(self) -> RowsForm:
        """Of the batches."""
        ...

    @property
    def layout(self) -> str:
        """Names what the order of the rows follows from, with a digest of it."""
        ...

    @property
    def traits(self) -> dict[str, list[Trait]]:
        """A few values that are equal on all ranks."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def room_for(self, pieces: Sequence[int]) -> DecodedRows:
        """Return what the rows of these pieces are decoded into, in this order."""
        ...
