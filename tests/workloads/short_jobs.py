"""A training over jobs that end often; a step only waits, so that few cores bear many ranks."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, Report
from tests.workloads import write_pid
from tests.workloads.healthy import sha256_of_weights

BATCH, NUM_SAMPLES = 24, 240


def prepare(ctx: RankContext) -> None:
    """Write nothing that matters: the points are drawn."""
    (ctx.data / "points").touch()


def train(ctx: RankContext) -> dict[str, Any]:
    """Train for so many epochs; return what the weights hash to.

    Each rank writes a line for each step that it has made, with its job and the step's time, into
    `options["folder"]`; `step` there is the newest one. A sample takes `options["sample_s"]`.
    """
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*torch.randn(2, NUM_SAMPLES, 8, generator=generator))
    torch.manual_seed(ctx.seed)
    bare = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 8))
    model = ctx.wrap(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(data, global_batch_size=BATCH)
    job = os.environ.get("SLURM_JOB_ID", "")
    path = Path(ctx.options["folder"], f"steps-{ctx.attempt}-{ctx.rank}.jsonl")
    with path.open("a", buffering=1) as lines:
        for batch in ctx.steps(loader, epochs=ctx.options["epochs"]):
            began = time.time()
            optimizer.zero_grad()
            for (inputs, targets), weight in ctx.micro_batches(batch):
                time.sleep(ctx.options["sample_s"] * len(inputs))
                loss = mse_loss(model(inputs), targets)
                (loss * weight).backward()
            optimizer.step()
            ctx.report(loss=loss)
            line = {"step": ctx.step, "attempt": ctx.attempt, "job": job}
            line |= {"began": began, "ended": time.time(), "world_size": ctx.world_size}
            lines.write(json.dumps(line) + "\n")
            if ctx.rank == 0:
                write_pid(ctx.options["folder"], "step", ctx.step)
    return {"sha256": sha256_of_weights(bare)}


def evaluate(ctx: RankContext) -> Report:
    """Score nothing."""
    return Report(num_samples=1, metrics={"epochs": float(ctx.options["epochs"])})
