"""A table and arrays that Dask computes; ranks train on windows of them, and fail if told."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.data import array, table
from prefect_torch_ddp.data.arrays import axes as array_axes
from tests.workloads import descend
from tests.workloads.dask_parts import META, grids, part
from tests.workloads.healthy import sha256_of_weights
from tests.workloads.tiny import fail_if_told

NUM_PARTS = 6


def _train(
    ctx: RankContext, dataset: Any, net: torch.nn.Module, loss_of: Callable[[Any, Any], Any]
) -> dict[str, Any]:
    model = ctx.wrap(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    for batch in ctx.steps(ctx.loader(dataset, global_batch_size=48), epochs=2):
        for fault in ctx.options.get("faults", ()):
            fail_if_told(ctx, fault)
        descend(ctx, optimizer, loss_of(model, batch))
    return {"sha256": sha256_of_weights(net)}


def _evaluate(ctx: RankContext) -> Report:
    """Score nothing."""
    return Report(num_samples=1)


class Table:
    """500 rows, in windows of at most two of five row groups."""

    evaluate = staticmethod(_evaluate)

    @staticmethod
    def prepare(ctx: RankContext) -> object:
        """Return a Dask DataFrame; one of its partitions may kill a worker, see `part`."""
        import dask.dataframe as dd

        make = partial(part, dies_in=ctx.options.get("dies_in"))
        return dd.from_map(make, range(NUM_PARTS), meta=META)

    @staticmethod
    def train(ctx: RankContext) -> dict[str, Any]:
        """Learn the half of a number."""
        rows = table(ctx.data_storage, features=["number"], target="half", shuffle_buffer=200)

        def loss_of(model: Any, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(model(batch[0] / 500)[:, 0], batch[1] / 500)

        return _train(ctx, rows, torch.nn.Linear(1, 1), loss_of)


class Array:
    """420 samples, which begin in several chunks, in buffers of at most 150."""

    evaluate = staticmethod(_evaluate)

    @staticmethod
    def prepare(ctx: RankContext) -> object:
        """Return a Dataset of xarray; one of its blocks may kill a worker, see `grid`."""
        return grids(ctx.options.get("dies_in"))

    @staticmethod
    def train(ctx: RankContext) -> dict[str, Any]:
        """Learn the next time from two before it."""
        array_axes.PIECE_BYTES = 1
        cut: dict[str, Any] = {"window": {"time": 3}, "patch": {"lat": 2, "lon": 2}}
        cut["stride"] = {"lat": 1, "lon": 1}
        samples = array(ctx.data_storage, "t2m", nan=0.0, shuffle_buffer=150, **cut)

        def loss_of(model: Any, batch: Any) -> Any:
            steps = batch["t2m"] / 1000
            return torch.nn.functional.mse_loss(model(steps[:, :2]), steps[:, 2:])

        return _train(ctx, samples, torch.nn.Conv2d(2, 1, 3, padding=1), loss_of)
