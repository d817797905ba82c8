"""Whichever ranks want to stop, and whenever their clocks say so, all ranks stop after the
same step, and stay stopped."""

import random
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from tests.support.ranks import config_for, train_on

NUM_STEPS = 5000
SEEDS = range(20261121, 20261123)


def train(
    ctx: RankContext, budgets_s: list[float], ask_at: list[int], paces_s: list[float]
) -> tuple[int, int | None]:
    """Train until a rank's time is up or its step has come; ranks have paces of their own and
    talk about nothing else.

    Returns:
        The step after which this rank stopped, and how far the weights say that it came.
    """
    counter = torch.nn.Linear(1, 1)
    with torch.no_grad():
        counter.weight.zero_()
    ctx.track(counter=counter)
    loader = ctx.loader(
        TensorDataset(torch.zeros(NUM_STEPS * ctx.world_size)), global_batch_size=ctx.world_size
    )
    began_s = time.monotonic()
    for _ in ctx.steps(loader, epochs=1):
        time.sleep(paces_s[ctx.rank])
        with torch.no_grad():
            counter.weight += 1
        if time.monotonic() - began_s > budgets_s[ctx.rank] or ctx.step >= ask_at[ctx.rank]:
            ctx.request_stop("it is time")
    return ctx.step, int(counter.weight.item())


@pytest.mark.parametrize("seed", SEEDS)
def test_all_ranks_stop_after_the_same_step(tmp_path: Path, seed: int) -> None:
    """Each rank has a clock and a pace of its own and nothing but the agreement keeps them
    together; a retry adds no step."""
    chance = random.Random(seed)
    world_size = chance.choice([2, 3])
    budgets_s = [chance.uniform(0.0, 1.0) for _ in range(world_size)]
    paces_s = [chance.choice([0.0005, 0.002, 0.005]) for _ in range(world_size)]
    never = [NUM_STEPS] * 3
    found = train_on(world_size, config_for(tmp_path, None), train, budgets_s, never, paces_s)
    (step,) = {step for step, _ in found}
    assert found == [(step, step)] * world_size
    assert 0 < step < NUM_STEPS
    again = train_on(world_size, config_for(tmp_path, None), train, [9.0] * 3, never, [0.0] * 3)
    assert again == found, "a training that asked to stop was taken up again"


@pytest.mark.parametrize("ask_at", [[17, 3, 55], [40, 41, 9], [1, 1], [NUM_STEPS, NUM_STEPS]])
def test_ranks_that_ask_in_steps_of_their_own_stop_together(
    tmp_path: Path, ask_at: list[int]
) -> None:
    """Early stopping by a value that differs from rank to rank: no rank stops before the first
    one asked; also in the first step, and in the last one, where none is left to hear of it."""
    num_ranks = len(ask_at)
    paces_s = [0.001 if num_ranks == 3 else 0.0] * num_ranks
    found = train_on(
        num_ranks, config_for(tmp_path, None), train, [60.0] * num_ranks, ask_at, paces_s
    )
    (step,) = {step for step, _ in found}
    assert found == [(step, step)] * num_ranks
    assert step == ask_at[0] if num_ranks == 2 else min(ask_at) <= step < NUM_STEPS
