"""Trainings that count steps instead of epochs; their results compare to the last bit."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from prefect_torch_ddp import RankContext
from tests.workloads import descend
from tests.workloads.healthy import die_after_checkpoint, points, sha256_of_weights

NUM_STEPS = 9


def train_on_draws(ctx: RankContext) -> dict[str, Any]:
    """Train on batches that the body draws, as nanoGPT's get_batch does, with dropout and noise
    from all generators; say what the weights hash to, and which steps this attempt made.

    Options: total, die_at, die_on (rank), die_after (step of the checkpoint that is to be on
    record first).
    """
    options, made = ctx.options, []
    inputs, targets = points(40)
    bare = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 3)).double()
    model = ctx.wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    state = ctx.state(last=0, squares=[])
    for step in ctx.steps(total=options.get("total", NUM_STEPS)):
        made.append(step)
        state.last = step
        state.squares.append(step * step)
        drawn = torch.randint(40, (6,))
        noise = 0.1 * random.random() + 0.1 * float(np.random.random())
        loss = nn.functional.cross_entropy(model(inputs[drawn] + noise), targets[drawn])
        descend(ctx, optimizer, loss)
        if step == options.get("die_at") and ctx.rank == options.get("die_on", 0):
            die_after_checkpoint(ctx, options.get("die_after"))
    return {"sha256": sha256_of_weights(bare), "made": made, "state": vars(state)}


class Shuffled:
    """A loader of others that knows its place: batches of row numbers, in an order that each pass
    draws from torch's global generator."""

    def __init__(self, num_rows: int, batch_size: int) -> None:
        self.num_rows, self.batch_size = num_rows, batch_size
        self.order: list[int] = []
        self.at = 0
        self._resumes = False

    def __iter__(self) -> "Shuffled":
        if not self._resumes:
            self.order, self.at = torch.randperm(self.num_rows).tolist(), 0
        self._resumes = False
        return self

    def __next__(self) -> list[int]:
        if self.at >= self.num_rows:
            raise StopIteration
        self.at += self.batch_size
        return self.order[self.at - self.batch_size : self.at]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at, self._resumes = state["order"], state["at"], True


def train_on_theirs(ctx: RankContext) -> dict[str, Any]:
    """The same over a loader of others, whose passes are of different length on each rank.

    Options: as above, and on_other_world_size.
    """
    options, made = ctx.options, []
    inputs, targets = points(40)
    bare = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 3)).double()
    model = ctx.wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    theirs = Shuffled(16 + 4 * ctx.rank, batch_size=4)
    other = options.get("on_other_world_size", "refuse")
    for rows in ctx.steps(theirs, total=NUM_STEPS, on_other_world_size=other):
        made.append(rows)
        loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
        descend(ctx, optimizer, loss)
        if ctx.step == options.get("die_at") and ctx.rank == options.get("die_on", 0):
            die_after_checkpoint(ctx, options.get("die_after"))
    return {"sha256": sha256_of_weights(bare), "made": made}


def by_length(epoch: int) -> torch.Tensor:
    """Return the order of an epoch: groups of neighbours, shuffled, and eight samples again."""
    generator = torch.Generator().manual_seed(epoch)
    groups = torch.randperm(10, generator=generator)[:, None] * 4 + torch.arange(4)
    return torch.cat([groups.flatten(), groups[:2].flatten()])


def train_in_own_order(ctx: RankContext) -> dict[str, Any]:
    """The same with `ctx.loader(order=...)`, three epochs of eight steps, with noise.

    Options: die_at, die_on, die_after.
    """
    options = ctx.options
    inputs, targets = points(40)
    bare = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model = ctx.wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    for batch in ctx.steps(ctx.loader(dataset, global_batch_size=6, order=by_length), epochs=3):
        optimizer.zero_grad()
        for (some, expected), weight in ctx.micro_batches(batch):
            noise = 0.1 * torch.randn_like(some) if ctx.config.is_elastic else 0.0
            loss = nn.functional.cross_entropy(model(some + noise), expected)
            (loss * weight).backward()
        optimizer.step()
        if ctx.step == options.get("die_at") and ctx.rank == options.get("die_on", 0):
            die_after_checkpoint(ctx, options.get("die_after"))
    return {"sha256": sha256_of_weights(bare), "steps": ctx.step}
