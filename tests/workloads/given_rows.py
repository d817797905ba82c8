"""A function that a Dask DataFrame is given to, which its rank reads as a table."""

import sys
from typing import Any

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data import table


def fit(ctx: RankContext, rows: Any, scale: float = 500.0) -> dict[str, Any]:
    """Learn the half of a number; the first attempt fails after its checkpoint."""
    import torch

    read = table(rows, features=["number"], target="half")
    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    ctx.track(model=model, optimizer=optimizer)
    for x, y in ctx.steps(ctx.loader(read, global_batch_size=64), epochs=2):
        loss = torch.nn.functional.mse_loss(model(x / scale)[:, 0], y / scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (ctx.attempt, ctx.epoch, ctx.epoch_ended) == (1, 1, True):
            ctx.checkpoint(force=True)
        if (ctx.attempt, ctx.epoch) == (1, 2):
            msg = "told to fail"
            raise RuntimeError(msg)
    has_dask = any(name.partition(".")[0] == "dask" for name in sys.modules)
    return {"rows": len(read), "has_dask": has_dask, "run_id": ctx.run_id, "attempt": ctx.attempt}
