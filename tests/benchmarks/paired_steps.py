"""Two trainings of the digits' model in the same ranks, a step of one and then of the other: what
a part of RankContext costs is told to some microseconds, while the machine's pace drifts.

They share a GIL and the caches, where a step has left little of what the other needs.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.examples.digits import DigitNet

NUM_SAMPLES, GLOBAL_BATCH_SIZE = 1260, 40
WARM_UP = 20
PARTS = (
    *("torch alone", "wrap", "loader", "loader, steps", "loader, steps, report"),
    "wrap, loader, steps, report",
)
"""What of RankContext a training uses."""


def train(ctx: RankContext, part: str, num_epochs: int, place: Path) -> None:
    """Train with a part of RankContext and with only torch; rank 0 writes the seconds of each
    pair of steps, of the training's thread and of all of the rank's: [steps, 2 trainings, 2]."""
    rows = torch.rand(NUM_SAMPLES, 1, 8, 8), torch.randint(10, (NUM_SAMPLES,))
    dataset = TensorDataset(*rows)
    loader = ctx.loader(dataset, global_batch_size=GLOBAL_BATCH_SIZE)
    wrap = ctx.wrap if "wrap" in part else DistributedDataParallel
    ours, torchs = _step_of(wrap(DigitNet())), _step_of(DistributedDataParallel(DigitNet()))
    batches: Iterable[Any] = _batches(dataset, num_epochs)
    if "steps" in part:
        batches = ctx.steps(loader, epochs=num_epochs)
    elif "loader" in part:
        batches = (batch for _ in range(num_epochs) for batch in loader)
    beside = _batches(dataset, num_epochs)
    pairs = []
    dist.barrier()
    began = _seconds()
    for batch in batches:  # what `steps` does after a body falls to ours
        loss = ours(*batch)
        if "report" in part:
            ctx.report(loss=loss)
        between = _seconds()
        torchs(*next(beside))
        ended = _seconds()
        pairs.append([_since(began, between), _since(between, ended)])
        began = _seconds()
    if ctx.rank == 0:
        place.write_text(json.dumps(pairs[WARM_UP:]))


def summary(pairs: list[list[list[float]]]) -> tuple[str, ...]:
    """Return of the training's thread: ms with torch alone, what is added in µs, its standard
    error, the ratio; of all threads what is added."""
    thread = [1e6 * (ours[0] - torchs[0]) for ours, torchs in pairs]
    every = [1e6 * (ours[1] - torchs[1]) for ours, torchs in pairs]
    alone_us = 1e6 * statistics.median(torchs[0] for _, torchs in pairs)
    added_us = statistics.median(thread)
    return (
        f"{alone_us / 1000:.2f}",
        f"{added_us:.0f}",
        f"{statistics.stdev(thread) / len(thread) ** 0.5:.0f}",
        f"{1 + added_us / alone_us:.3f}",
        f"{statistics.median(every):.0f}",
    )


def _batches(dataset: TensorDataset, num_epochs: int) -> Iterator[Any]:
    loader = DataLoader(dataset, GLOBAL_BATCH_SIZE // 2, sampler=DistributedSampler(dataset))
    for _ in range(num_epochs):
        yield from loader


def _step_of(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def _seconds() -> tuple[float, float]:
    return time.thread_time(), time.process_time()


def _since(before: tuple[float, float], now: tuple[float, float]) -> list[float]:
    return [after - earlier for earlier, after in zip(before, now, strict=True)]
