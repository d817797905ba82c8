"""Flows whose runs a tracker gets; run as `python -m tests.workloads.fed_flows KIND STORAGE`.

It needs a Python that has the tracker, and trains on two Dask workers.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from prefect import flow
from prefect_dask import DaskTaskRunner

from prefect_torch_ddp import CheckpointParams, RankContext, TrainParams, ddp_task, train_flow
from tests.workloads import write_pid

CLUSTER = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
EVERY = CheckpointParams(every_steps=10, every_s=None)
KILLS = {1: 25, 2: 47, 3: 48}
"""By attempt: the step in which rank 1 is killed."""
NUM_STEPS = 100


def fit(ctx: RankContext, fails_at: int | None = None) -> int:
    """Train, with ranks that are killed; fail for good at a step."""
    import torch
    from torch.utils.data import TensorDataset

    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(TensorDataset(torch.linspace(-1, 1, 40)[:, None]), global_batch_size=4)
    for (x,) in ctx.steps(loader, epochs=NUM_STEPS // 10):
        if ctx.rank == 1 and KILLS.get(ctx.attempt) == ctx.step:
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.step == fails_at:
            msg = "told to fail"
            raise ValueError(msg)
        loss = (model(x) - 3 * x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss, step_plus_rank=ctx.step + ctx.rank)
    return ctx.step


def task_flow(storage: str, trackers: list[Any], fails_at: int | None = None) -> None:
    """Run it as a task of a flow: submitted, and called."""
    train = ddp_task(
        name="fit",
        world_size=2,
        trackers=trackers,
        storage=storage,
        checkpoint=EVERY,
        max_restarts=3,
    )(fit)

    @flow(name="fed", task_runner=DaskTaskRunner(cluster_kwargs=CLUSTER))  # type: ignore[arg-type]
    def fed() -> None:
        train.submit().result()
        train(fails_at)

    fed()


def main(kind: str, storage: str, *trackers: str) -> None:
    """Run a kind of flow."""
    if kind == "task":
        task_flow(storage, list(trackers))
    elif kind == "failing-task":
        task_flow(storage, list(trackers), fails_at=55)
    else:
        folder = Path(storage).parent
        write_pid(folder, "flow")
        workload = "tests.workloads.tiny:Steered" if kind == "steered" else "tests.workloads.tiny"
        fault = {"how": "SIGKILL", "step": 25, "rank": 1, "attempts": [1]}
        params: dict[str, Any] = {
            "workload": workload,
            "storage": storage,
            "options": {"folder": str(folder), "fault": fault, "epochs": 12},
            "trackers": trackers,
            "checkpoint": EVERY,
        }
        train_flow(TrainParams(**params))


if __name__ == "__main__":
    main(*sys.argv[1:])
