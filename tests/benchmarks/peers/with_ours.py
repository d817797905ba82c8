"""prefect_torch_ddp: a `ddp_task` in a flow, as in the README.

An argument is the steps between two checkpoints; without it the default decides, which saves a
training as small as this one every two seconds. The loss is reported at every step. Prefect starts
a temporary server, and the flow a local Dask cluster.
"""

import sys

import torch
from prefect import flow
from prefect_dask import DaskTaskRunner
from torch.nn.functional import cross_entropy

from prefect_torch_ddp import CheckpointParams, RankContext, ddp_task, local_cluster
from tests.benchmarks.peers.training import (
    EPOCHS,
    FOLDER,
    GLOBAL_BATCH_SIZE,
    LR,
    NUM_RANKS,
    Observed,
    make_data,
    make_model,
)

SAVES = CheckpointParams(every_s=None, every_steps=int(sys.argv[1])) if sys.argv[1:] else None


@ddp_task(
    world_size=NUM_RANKS,
    max_restarts=1000,
    storage=str(FOLDER / "storage"),
    checkpoint=SAVES or CheckpointParams(),
)
def fit(ctx: RankContext, lr: float) -> None:
    """Train on one rank."""
    observed = Observed(ctx.rank)
    model = ctx.wrap(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(make_data(), global_batch_size=GLOBAL_BATCH_SIZE)
    for inputs, targets in ctx.steps(loader, epochs=EPOCHS):
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with observed.reporting():
            ctx.report(loss=loss)
        observed.step(ctx.step)


CLUSTER = {"n_workers": NUM_RANKS}
RUNNER = DaskTaskRunner(cluster_class=local_cluster, cluster_kwargs=CLUSTER)


@flow(task_runner=RUNNER)  # type: ignore[arg-type]
def train() -> None:
    """Run the task."""
    fit.submit(lr=LR).result()


if __name__ == "__main__":
    train()
