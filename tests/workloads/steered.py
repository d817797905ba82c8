"""Owns a training that goes on until a file tells it to stop, and leaves its newest step for the test."""

import time
from pathlib import Path
from typing import Any

import torch

from prefect_torch_ddp import RankContext, Report
from tests.workloads import tiny


def prepare(rank: RankContext) -> None:
    """Write tiny's points."""
    tiny.prepare(rank)


def train(rank: RankContext) -> dict[str, Any]:
    """Train in `options["folder"]`'s sight: `step` in it is the newest one, `<rank>` a pid; a file `enough` ends the training."""
    folder = Path(rank.options["folder"])
    model = rank.wrap(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank.track(model=model, optimizer=optimizer)
    tiny.write_pid(folder, rank.rank)
    loader = rank.loader(tiny.read(rank, "train"), global_batch_size=8)
    for points, labels in rank.steps(loader, epochs=100_000):
        loss = torch.nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rank.report(loss=loss)
        time.sleep(0.02)  # the pace of a step with work in it
        if rank.rank == 0:
            (folder / "step.tmp").write_text(str(rank.step))
            (folder / "step.tmp").rename(folder / "step")
        if (folder / "enough").exists():
            rank.request_stop("told to")
    return {"steps": rank.step}


def evaluate(rank: RankContext) -> Report:
    """Score as tiny does."""
    return tiny.evaluate(rank)
