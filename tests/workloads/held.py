"""A workload whose first attempt stops in the middle, with a checkpoint on record, until
somebody ends it from outside."""

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.checkpoint.manifest import list_checkpoints
from tests.workloads.tiny import write_pid

HELD_AT = 6
HELD_S = 120.0
NUM_STEPS = 12


def prepare(ctx: RankContext) -> None:
    """Write twelve points on a line."""
    x = torch.linspace(-1, 1, 12).unsqueeze(1)
    torch.save({"x": x, "y": 2 * x}, ctx.data / "line.pt")


def train(ctx: RankContext) -> dict[str, Any]:
    """Train for twelve steps; in the first attempt wait before the sixth, when all ranks have
    left their pids."""
    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(TensorDataset(*read(ctx)), global_batch_size=4)
    for x, y in ctx.steps(loader, epochs=4):
        if ctx.attempt == 1 and ctx.step == HELD_AT:
            hold(ctx)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
        print(f"step {ctx.step}")
    return {"steps": ctx.step}


def hold(ctx: RankContext) -> None:
    """Wait until a checkpoint is on record, leave this rank's pid, and go no further."""
    while not list_checkpoints(ctx.config.storage, ctx.run_id):
        time.sleep(0.05)
    write_pid(Path(ctx.options["pid_folder"]), ctx.rank)
    time.sleep(HELD_S)
    msg = f"nobody ended this attempt within {HELD_S:g} s"
    raise TimeoutError(msg)


def evaluate(ctx: RankContext) -> Report:
    """Count the points on whose side of zero the trained model is."""
    model = torch.nn.Linear(1, 1)
    ctx.track(model=model)
    x, y = read(ctx)
    with torch.no_grad():
        right = ((model(x) > 0) == (y > 0)).double().mean().item()
    return Report(num_samples=len(x), accuracy=right)


def read(ctx: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the points and their values, float32 [12, 1] each."""
    saved = torch.load(ctx.data / "line.pt", weights_only=True)
    return saved["x"], saved["y"]
