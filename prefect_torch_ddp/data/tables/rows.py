"""What the reader of windows asks of a dataset's rows: a table's, or the samples of arrays."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from prefect_torch_ddp.data.traits import Trait


class RowsForm(Protocol):
    """Where decoded rows lie, and what a batch is made of them."""

    def new_arrays(self, num_rows: int) -> list[np.ndarray[Any, Any]]:
        """Return room for so many rows: arrays [rows, ...]."""
        ...

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
        """A digest of what the order of the rows follows from."""
        ...

    @property
    def traits(self) -> dict[str, list[Trait]]:
        """A few values that are equal on all ranks."""
        ...

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def decode(self, number: int, arrays: Sequence[np.ndarray[Any, Any]], start: int) -> None:
        """Decode a piece into the form's arrays, from a row on."""
        ...
