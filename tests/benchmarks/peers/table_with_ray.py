"""Ray Data: a training on a Parquet table, for bench_table.py. For each number of steps on its
standard input it makes so many and prints their seconds.

As in Ray's guide "Iterating over Data": `iter_torch_batches` with a `NumpyBatchCollateFn`, and with
a local shuffle buffer if one is asked for. Ray starts on this machine by itself; its dashboard is
off.
"""

import sys
from collections.abc import Iterator, Mapping

import numpy as np
import ray.data
import torch
from ray.data.collate_fn import NumpyBatchCollateFn

from tests.benchmarks.table_parts import FEATURES
from tests.benchmarks.table_training import Training

Batch = tuple[torch.Tensor, torch.Tensor]


class Tensors(NumpyBatchCollateFn):  # type: ignore[misc]
    """Makes a batch's features and target of its columns."""

    def __call__(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Stack the features; copy the target, which can't be written to."""
        x = np.stack([batch[name] for name in FEATURES], axis=1)
        return torch.from_numpy(x), torch.from_numpy(batch["target"].copy())


def batches_of(folder: str, size: int, shuffled_rows: int | None) -> Iterator[Batch]:
    """Yield the batches of epoch after epoch."""
    rows = ray.data.read_parquet(folder)
    while True:
        yield from rows.iter_torch_batches(
            batch_size=size,
            collate_fn=Tensors(),
            local_shuffle_buffer_size=shuffled_rows,
            drop_last=True,
        )


if __name__ == "__main__":
    folder, size, hidden, shuffled_rows = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    ray.init(include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    training = Training(batches_of(folder, size, shuffled_rows or None), hidden)
    for line in sys.stdin:
        print("seconds", training.run(int(line)), flush=True)
    ray.shutdown()
