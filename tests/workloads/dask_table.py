"""A workload whose dataset Dask computes: a table, on which a small model trains."""

from functools import partial

import torch

from prefect_torch_ddp import RankContext, RegressionMeter, Report
from prefect_torch_ddp.data import table
from tests.workloads.dask_parts import META, held_part, part

NUM_PARTS = 6


def prepare(ctx: RankContext) -> object:
    """Return a Dask DataFrame; if `options["hold"]` is a folder, see `held_part`."""
    import dask.dataframe as dd

    if hold := ctx.options.get("hold"):
        return dd.from_map(partial(held_part, folder=hold), range(NUM_PARTS), meta=META)
    return dd.from_map(part, range(NUM_PARTS), meta=META)


def train(ctx: RankContext) -> dict[str, float]:
    """Learn the half of a number."""
    rows = table(ctx.data_storage, features=["number"], target="half")
    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    ctx.track(model=model, optimizer=optimizer)
    for x, y in ctx.steps(ctx.loader(rows, global_batch_size=64), epochs=3):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x / 500)[:, 0], y / 500)
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
    return {"rows": len(rows)}


def evaluate(ctx: RankContext) -> Report:
    """Score it on the same rows."""
    rows = table(ctx.data_storage, features=["number"], target="half")
    model = torch.nn.Linear(1, 1)
    ctx.track(model=model)
    meter = RegressionMeter()
    with torch.no_grad():
        for x, y in ctx.loader(rows, global_batch_size=64, shuffle=False):
            meter.update(model(x / 500)[:, 0], y / 500)
    return meter.report()
