"""The training of the benchmarks of tables; a peer's interpreter runs it too, so it loads only
torch."""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tests.benchmarks.table_parts import NUM_COLUMNS


class Training:
    """A three-layer perceptron, which makes a number of steps at a time and continues from
    there."""

    def __init__(self, batches: Iterator[Any], hidden: int) -> None:
        sizes = (NUM_COLUMNS - 1, hidden, hidden, 1)
        layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
        self._model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._batches: Any = batches

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
