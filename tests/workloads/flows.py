"""A user's flow with a ddp_task that fails once, and a workload next to its flow: modules
that import Prefect at their tops. `prefect flow-run retry` loads this file."""

import logging
import os
import time
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import CheckpointParams, RankContext, Report, ddp_task
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from tests.support.waiting import wait_until
from tests.workloads import descend


def fit(
    ctx: RankContext, fail_at: int | None = None, epochs: int = 2, mark: str = ""
) -> dict[str, object]:
    """Train, fail on rank 1 in the first attempt, say which steps this attempt made.

    With a mark the first attempt makes that file in step 8, and waits until it is stopped.
    """
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    model = ctx.wrap(nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.3), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(TensorDataset(torch.linspace(-1, 1, 24)[:, None]), global_batch_size=4)
    storage = ctx._assembly.saver._committer.storage
    made = []
    for (x,) in ctx.steps(loader, epochs=epochs):
        if (ctx.rank, ctx.attempt, ctx.step) == (1, 1, fail_at):
            # Rank 0, killed by this failure, may still be at the commit of step 3.
            wait_until(lambda: list_manifests(storage, ctx.run_id))
            msg = "told to fail"
            raise ValueError(msg)
        if mark and (ctx.attempt, ctx.step) == (1, 8):
            Path(mark).touch()
            time.sleep(200)
        descend(ctx, optimizer, (model(x) - 3 * x).square().mean())
        made.append(ctx.step)
    weights = [parameter.tolist() for parameter in model.parameters()]
    return {"attempt": ctx.attempt, "run_id": ctx.run_id, "made": made, "weights": weights}


train = ddp_task(
    world_size=2,
    seed=5,
    checkpoint=CheckpointParams(every_s=None, every_steps=3),
    storage=os.environ.get("RETRIED_STORE", "/nowhere"),
    run_key="night",
)(fit)


@flow(
    name="retried",
    task_runner=DaskTaskRunner(
        cluster_kwargs={"n_workers": 2, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
    ),  # type: ignore[arg-type]
)
def retried() -> str | None:
    """Train twice; the second training fails in its first attempt."""
    train(None)
    train.submit(7).result()
    return flow_run.id


class Logging:
    """The tiny workload, whose train also logs."""

    @staticmethod
    def prepare(ctx: RankContext) -> None:
        from tests.workloads import tiny

        tiny.prepare(ctx)

    @staticmethod
    def train(ctx: RankContext) -> dict[str, object]:
        from tests.workloads import tiny

        logging.getLogger("user.code").info("logged by user code")
        return tiny.train(ctx)

    @staticmethod
    def evaluate(ctx: RankContext) -> Report:
        from tests.workloads import tiny

        return tiny.evaluate(ctx)
