"""A training of many small steps whose every record counts; it may be killed, and may wait
until somebody has read it."""

import os
import signal
import time

import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.errors import ObjectNotFoundError

PATIENCE_S = 60.0
GO_ON = "go-on"


def report_steps(ctx: RankContext) -> int:
    """Make steps of four samples and report each; hand over a file.

    Options: num_steps; kill: {attempt: [rank, step]}; fail_at: step; wait_at: the step in which
    all wait for an object of the storage.
    """
    torch.set_num_threads(1)
    num_steps = ctx.options["num_steps"]
    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(
        TensorDataset(torch.linspace(-1, 1, 2 * num_steps).unsqueeze(1)), global_batch_size=4
    )
    for (batch,) in ctx.steps(loader, epochs=2):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss, twice_step_plus_rank=2 * ctx.step + ctx.rank)
        if ctx.step == 1 and ctx.rank == 0:
            ctx.save("notes/first-step.txt", "of attempt 1: é")
        _strike(ctx)
    return ctx.step


def _strike(ctx: RankContext) -> None:
    options = ctx.options
    if options.get("kill", {}).get(ctx.attempt) == [ctx.rank, ctx.step]:
        os.kill(os.getpid(), signal.SIGKILL)
    if ctx.step == options.get("fail_at"):
        msg = f"told to fail at step {ctx.step}"
        raise ValueError(msg)
    deadline = time.monotonic() + PATIENCE_S
    while ctx.step == options.get("wait_at") and not _may_go_on(ctx):
        assert time.monotonic() < deadline, "nobody let it go on"
        time.sleep(0.02)


def _may_go_on(ctx: RankContext) -> bool:
    try:
        return bool(ctx.config.storage.read(GO_ON))
    except ObjectNotFoundError:
        return False
