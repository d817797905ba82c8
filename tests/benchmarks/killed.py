"""A training that is killed at given times and ends at a given time, for bench_killed."""

import os
import signal
import time

import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext

WIDTH = 256


def train(ctx: RankContext, began: float, lasts_s: float, kill_every_s: float | None) -> int:
    """Train on the wall clock; return the steps that were kept.

    Args:
        ctx: of two ranks; its state is 2 MB.
        began: when the whole training began, in Unix seconds, restarts included.
        lasts_s: all ranks stop that much later.
        kill_every_s: rank 1 of the n-th attempt is killed after n times that.
    """
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    model = ctx.wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(TensorDataset(torch.randn(4096, WIDTH)), global_batch_size=64)
    for (rows,) in ctx.steps(loader, epochs=1_000_000):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        passed_s = time.time() - began
        if passed_s > lasts_s:
            ctx.request_stop("the time is over")
        if kill_every_s is not None and ctx.rank == 1 and passed_s > kill_every_s * ctx.attempt:
            os.kill(os.getpid(), signal.SIGKILL)
    return ctx.step
