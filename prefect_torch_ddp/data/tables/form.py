"""The form of a table's batches: how columns lie in memory, and the tensors made from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from prefect_torch_ddp.data.sampler import short_digest

Array: TypeAlias = np.ndarray[Any, Any]
Batch: TypeAlias = dict[str, torch.Tensor] | tuple[torch.Tensor, torch.Tensor] | torch.Tensor


@dataclass(frozen=True)
class Block:
    """Columns of one dtype in one array [rows, columns], so that a row's values lie together."""

    dtype: str
    """The dtype, by NumPy's name."""
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Form:
    """The blocks that a table is read into, and the batches made from them.

    Without features there is a block for each dtype, and a batch is a dict of tensors [rows] by
    column, in the order of `names`. With features the first block is x [rows, features]. The
    second block is y: [rows] for one target, [rows, targets] for several.
    """

    names: tuple[str, ...]
    blocks: tuple[Block, ...]
    has_features: bool

    @classmethod
    def by_column(cls, dtypes: dict[str, str]) -> "Form":
        """Return the form for batches that are dicts; `dtypes` has the dtype of each column."""
        columns: dict[str, list[str]] = {}
        for name, dtype in dtypes.items():
            columns.setdefault(dtype, []).append(name)
        blocks = (Block(dtype, tuple(names)) for dtype, names in columns.items())
        return cls(tuple(dtypes), tuple(blocks), has_features=False)

    @classmethod
    def of_features(cls, features: Sequence[str], targets: Sequence[str], dtype: str) -> "Form":
        """Return the form for batches (x, y), or x if there is no target."""
        blocks = [Block("float32", tuple(features))]
        if targets:
            blocks.append(Block(dtype, tuple(targets)))
        return cls((*features, *targets), tuple(blocks), has_features=True)

    def meaning(self, categories: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return digests that are equal on two ranks if the numbers in their batches mean the same.

        Of a dict the order of the columns doesn't count.
        """
        names = [each.columns for each in self.blocks] if self.has_features else sorted(self.names)
        codes = sorted((name, *values) for name, values in categories.items())
        listed = {"list of columns": names, "list of categories": codes}
        return {
            name: short_digest(repr(each).encode(errors="surrogatepass"))
            for name, each in listed.items()
        }

    @property
    def row_bytes(self) -> int:
        """The bytes of a row in memory."""
        return sum(np.dtype(block.dtype).itemsize * len(block.columns) for block in self.blocks)

    def new_arrays(self, num_rows: int) -> list[Array]:
        """Return empty arrays for so many rows: [rows, columns] for each block.

        Rows that are never written take no memory, since the kernel allocates a page at the
        first write to it.
        """
        return [np.empty((num_rows, len(each.columns)), each.dtype) for each in self.blocks]

    def batch(self, parts: Sequence[Sequence[torch.Tensor]]) -> Batch:
        """Return a batch of joined parts; a part has a tensor [rows, columns] for each block."""
        joins = len(parts) > 1
        whole = [torch.cat(each) if joins else each[0] for each in zip(*parts, strict=True)]
        if self.has_features:
            if len(whole) == 1:
                return whole[0]
            x, y = whole
            return x, y.reshape(-1) if y.shape[1] == 1 else y
        columns: dict[str, torch.Tensor] = {}
        for block, tensor in zip(self.blocks, whole, strict=True):
            # Each column is contiguous.
            columns.update(zip(block.columns, tensor.t().contiguous().unbind(), strict=True))
        return {name: columns[name] for name in self.names}

    def samples(self, batch: Batch) -> list[Any]:
        """Return the samples of a batch, of which torch's default_collate makes the same batch."""
        if isinstance(batch, torch.Tensor):
            return list(batch.unbind())
        if isinstance(batch, tuple):
            return list(zip(*(part.unbind() for part in batch), strict=True))
        columns = zip(*(column.unbind() for column in batch.values()), strict=True)
        return [dict(zip(batch, values, strict=True)) for values in columns]
