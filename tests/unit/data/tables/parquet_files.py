"""Parquet files for tests, and walks over a table on any number of ranks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.unit.data.test_loader import loader_of


def write(path: Path, columns: Mapping[str, Any], **options: Any) -> Path:
    """Write a file of columns, each a list or an Arrow array; return its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, **options)
    return path.parent


def numbered(folder: Path, sizes: Sequence[int], row_group_size: int) -> Path:
    """Write files of so many rows: `number` counts through all of them, `half` is half of that."""
    first = 0
    for i, size in enumerate(sizes):
        numbers = list(range(first, first + size))
        columns = {"number": pa.array(numbers, pa.int64()), "half": [n / 2 for n in numbers]}
        columns["half"] = pa.array(columns["half"], pa.float32())
        write(folder / f"{i:03d}.parquet", columns, row_group_size=row_group_size)
        first += size
    return folder


def walk(
    rows: Any, size: int, world: int, epoch: int = 0, start: int = 0, **options: Any
) -> list[list[int]]:
    """Walk all ranks in lockstep; return the numbers of each global batch that count.

    The ids that a ledger gets have to be those numbers.
    """
    options = {"keep_ids": True, **options}
    loaders = [loader_of(rows, size, rank, world, **options) for rank in range(world)]
    steps = zip(*(loader.lockstep(epoch, start) for loader in loaders), strict=True)
    batches = []
    for step in steps:
        counted = [n for data, share in step for n in data["number"][: share.num_local].tolist()]
        ids = [n for _, share in step for n in share.samples]
        assert ids == counted
        batches.append(counted)
    return batches


def virtual_shares(rows: Any, size: int, world: int) -> list[list[list[int]]]:
    """Walk four virtual ranks on so many; return the numbers of each one's share of each batch."""
    loaders = [loader_of(rows, size, rank, world, virtual_ranks=4) for rank in range(world)]
    steps = zip(*(loader.lockstep(0) for loader in loaders), strict=True)
    return [
        [s.batch["number"].tolist() for data, _ in step for s in data.shares if s.num_samples]
        for step in steps
    ]


def noisy_batches(rows: Any, size: int, **options: Any) -> list[list[float]]:
    """Return the numbers of each batch, to which a collate_fn adds noise."""

    def noisy(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["number"] + torch.rand(len(batch["number"]))

    loader = loader_of(rows, size, collate_fn=noisy, **options)
    return [batch.tolist() for batch, _ in loader.lockstep(0)]
