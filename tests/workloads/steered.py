"""A training that goes on until a file tells it to stop, and leaves its newest step for
the test."""

import time
from pathlib import Path
from typing import Any

import torch

from prefect_torch_ddp import RankContext, Report
from tests.workloads import tiny


def prepare(ctx: RankContext) -> None:
    """Write tiny's points."""
    tiny.prepare(ctx)


def train(ctx: RankContext) -> dict[str, Any]:
    """Train in `options["folder"]`'s sight: `step` in it is the newest one, `<rank>` a pid; a
    file `enough` ends the training."""
    folder = Path(ctx.options["folder"])
    model = ctx.wrap(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    tiny.write_pid(folder, ctx.rank)
    loader = ctx.loader(tiny.read(ctx, "train"), global_batch_size=8)
    for points, labels in ctx.steps(loader, epochs=100_000):
        loss = torch.nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
        time.sleep(0.02)  # the pace of a step with work in it
        if ctx.rank == 0:
            (folder / "step.tmp").write_text(str(ctx.step))
            (folder / "step.tmp").rename(folder / "step")
        if (folder / "enough").exists():
            ctx.request_stop("told to")
    return {"steps": ctx.step}


def evaluate(ctx: RankContext) -> Report:
    """Score as tiny does."""
    return tiny.evaluate(ctx)
