"""A training that one rank leaves while the others go on."""

import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext


def train(ctx: RankContext, leaver: int) -> int:
    """Track and step as a workload does; the leaver returns in step 5."""
    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    for inputs, targets in ctx.steps(
        ctx.loader(TensorDataset(x, 2 * x), global_batch_size=8), epochs=5
    ):
        if ctx.step == 5 and ctx.rank == leaver:
            return ctx.step
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return ctx.step
