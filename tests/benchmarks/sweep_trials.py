"""A sweep's trial, whose training takes a second that costs no processor time."""

import time

import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext

NUM_STEPS = 20
STEP_S = 0.05


def trial(ctx: RankContext, lr: float) -> float:
    """Train for a second; return the seconds between the first step's begin and the last's end."""
    model = ctx.wrap(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    ctx.track(model=model, optimizer=optimizer)
    rows = TensorDataset(torch.randn(NUM_STEPS * 4, 8, generator=torch.Generator().manual_seed(0)))
    began = 0.0
    for (batch,) in ctx.steps(ctx.loader(rows, global_batch_size=4), epochs=1):
        began = began or time.monotonic()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
        time.sleep(STEP_S)
    return time.monotonic() - began


def idle(lr: float) -> float:
    """Wait as long as `trial` trains; return the seconds."""
    began = time.monotonic()
    time.sleep(NUM_STEPS * STEP_S)
    return time.monotonic() - began
