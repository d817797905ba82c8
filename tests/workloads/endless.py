"""A training that goes on for ever and tells its processes, for tests that end it from
outside."""

import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.storage.directory import DirectoryStorage


def config_in(folder: Path) -> RankConfig:
    """Describe a training that writes no checkpoint unless it is stopped."""
    storage = DirectoryStorage(folder / "store")
    policy = CheckpointParams(every_s=None)
    return RankConfig(
        run_id="run",
        attempt=claim_attempt(storage, "run"),
        stage="train",
        storage=storage,
        checkpoint=policy,
    )


def train(ctx: RankContext, pid_folder: str) -> None:
    """Take small steps; write this rank's pid in the third."""
    model = ctx.wrap(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(TensorDataset(torch.ones(4000, 2)), global_batch_size=4)
    for (points,) in ctx.steps(loader, epochs=10_000):
        optimizer.zero_grad()
        model(points).sum().backward()
        optimizer.step()
        if ctx.step == 3:
            path = Path(pid_folder, str(ctx.rank))
            path.with_suffix(".tmp").write_text(str(os.getpid()))
            path.with_suffix(".tmp").rename(path)
