"""What every peer's script trains, and the marks by which it is observed from outside."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

FOLDER = Path(os.environ.get("PTD_PEER_FOLDER", "."))
"""Where a run leaves everything: marks, process ids, checkpoints."""
EPOCHS = int(os.environ.get("PTD_PEER_EPOCHS", "1"))
LR = 1e-3
GLOBAL_BATCH_SIZE, NUM_RANKS = 256, 2
BATCH_SIZE = GLOBAL_BATCH_SIZE // NUM_RANKS
STEPS_PER_EPOCH = 128
SAVE_EVERY, REPORT_EVERY = 100, 10
"""Optimizer steps, where a script chooses."""
INPUTS, WIDTH, CLASSES = 256, 512, 10


def make_model() -> torch.nn.Sequential:
    """Return a perceptron; its state with AdamW's moments has 11 MB."""
    torch.manual_seed(0)
    hidden = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    layers = [torch.nn.Linear(INPUTS, WIDTH), *hidden, torch.nn.Linear(WIDTH, CLASSES)]
    with_relu = [part for layer in layers for part in (layer, torch.nn.ReLU())]
    return torch.nn.Sequential(*with_relu[:-1])


def make_data() -> TensorDataset:
    """Return the rows of an epoch and their classes."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(STEPS_PER_EPOCH * GLOBAL_BATCH_SIZE, INPUTS, generator=generator)
    return TensorDataset(rows, rows[:, :CLASSES].argmax(1))


class Observed:
    """A rank that can be found and killed; rank 0 also writes when it has done which step."""

    def __init__(self, rank: int) -> None:
        """Leave the rank's process id."""
        self._marks = (FOLDER / "marks").open("a", buffering=1) if rank == 0 else None
        self._report_s = 0.0
        (FOLDER / f"rank-{rank}").write_text(str(os.getpid()))

    def step(self, number: int) -> None:
        """Note that a step of the whole training is done, counted from 1."""
        if self._marks is not None:
            self._marks.write(f"{time.time()} {number} {self._report_s} {os.getpid()}\n")
            self._report_s = 0.0

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Measure how long reporting a step's loss takes."""
        began = time.perf_counter()
        yield
        self._report_s = time.perf_counter() - began
