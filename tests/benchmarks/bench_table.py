"""A training on a Parquet table, compared with the same training on tensors in memory."""

import os
import resource
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp.data import table
from prefect_torch_ddp.data.loader import RankLoader
from tests.benchmarks.beside import median_and_half, rounds, show

pytestmark = pytest.mark.timeout(1800)
ROUNDS = rounds(5)
NUM_COLUMNS, GROUP_ROWS, FILE_ROWS = 64, 16_384, 131_072
NUM_ROWS = int(os.environ.get("PTD_BENCH_ROWS", str(2**20)))
STEPS_A_ROUND = 400
FEATURES = [f"c{i:02d}" for i in range(NUM_COLUMNS - 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give rows of 64 float32 columns, by zstd."""
    where = tmp_path_factory.mktemp("table")
    generator = np.random.default_rng(0)
    for i in range(NUM_ROWS // FILE_ROWS):
        values = generator.standard_normal((NUM_COLUMNS, FILE_ROWS), dtype=np.float32)
        rows = pa.table(dict(zip([*FEATURES, "target"], values, strict=True)))
        options: dict[str, Any] = {"row_group_size": GROUP_ROWS, "use_dictionary": False}
        pq.write_table(rows, where / f"{i:04d}.parquet", compression="zstd", **options)
    return where


def in_memory(folder: Path) -> TensorDataset:
    """Return the same rows as tensors."""
    read = pq.read_table(folder)
    x = np.stack([read[name].to_numpy() for name in FEATURES], axis=1)
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(read["target"].to_numpy().copy()))


class Training:
    """A three-layer perceptron, which makes a number of steps at a time and continues from
    there."""

    def __init__(self, dataset: Any, batch_size: int, hidden: int) -> None:
        sizes = (NUM_COLUMNS - 1, hidden, hidden, 1)
        layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        self._model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._loader = RankLoader(
            dataset, global_batch_size=batch_size, rank=0, world_size=1, seed=1
        )
        self._batches: Any = self._endless()

    def _endless(self) -> Iterator[Any]:
        epoch = 0
        while True:
            for batch, _ in self._loader.lockstep(epoch):
                yield batch
            epoch += 1

    def run(self, num_steps: int) -> float:
        """Return the seconds of so many steps."""
        began_s = time.perf_counter()
        for _ in range(num_steps):
            x, y = next(self._batches)
            loss = nn.functional.mse_loss(self._model(x)[:, 0], y)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        return time.perf_counter() - began_s

    def close(self) -> None:
        """Let go of what is read ahead."""
        self._batches.close()


@pytest.mark.parametrize(("batch_size", "hidden"), [(256, 512), (1024, 512), (1024, 1536)])
def test_table_beside_tensors_in_memory(folder: Path, batch_size: int, hidden: int) -> None:
    """Print rows/s of both, turn about; a table's ratio to tensors."""
    torch.set_num_threads(1)
    rows = table(folder, features=FEATURES, target="target")
    ways = {
        "tensors in memory": Training(in_memory(folder), batch_size, hidden),
        "table": Training(rows, batch_size, hidden),
    }
    for training in ways.values():
        training.run(20)
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            seen[name].append(ways[name].run(STEPS_A_ROUND))
    shown = []
    for name, seconds in seen.items():
        ways[name].close()
        pairs = zip(seconds, seen["tensors in memory"], strict=True)
        step_ms = sorted(seconds)[len(seconds) // 2] / STEPS_A_ROUND * 1000
        ratios = median_and_half([theirs / ours for ours, theirs in pairs])
        shown.append((name, f"{step_ms:.2f}", f"{batch_size / step_ms * 1000:.0f}", *ratios))
    head = f"batches of {batch_size}, {hidden} hidden | step ms | rows/s | times tensors' | half"
    show(head, shown)


def test_table_first_batch_resume_and_memory(folder: Path) -> None:
    """Print the time to a first batch, at an epoch's start and in its middle, rows/s of a pass
    that does nothing else, and the most memory that this takes in a process."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, _measured(folder).encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        show("what | value", [tuple(line.split("|")) for line in said.read().splitlines()])


def _measured(folder: Path) -> str:
    before = psutil.Process().memory_info().rss
    began_s = time.perf_counter()
    rows = table(folder, features=FEATURES, target="target")
    opened_s = time.perf_counter() - began_s
    firsts = []
    for start in (0, 0.37):
        loader = RankLoader(rows, global_batch_size=1024, rank=0, world_size=1)
        began_s = time.perf_counter()
        steps: Any = loader.lockstep(0, int(start * len(loader)))
        next(iter(steps))
        firsts.append(time.perf_counter() - began_s)
        steps.close()
    loader = RankLoader(rows, global_batch_size=1024, rank=0, world_size=1)
    began_s = time.perf_counter()
    for _ in loader.lockstep(0):
        pass
    pace = len(rows) / (time.perf_counter() - began_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return (
        f"table() of {len(rows)} rows|{opened_s * 1000:.0f} ms\n"
        f"first batch of an epoch|{firsts[0] * 1000:.0f} ms\n"
        f"first batch after a resume in its middle|{firsts[1] * 1000:.0f} ms\n"
        f"a pass that does nothing else|{pace:.0f} rows/s\n"
        f"memory added at most|{peak / 1e6:.0f} MB\n"
    )
