"""Owns a training of many small steps whose every record counts; it may be killed, and may wait until somebody has read it."""

import os
import signal
import time

import torch
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.errors import ObjectNotFoundError

PATIENCE_S = 60.0
GO_ON = "go-on"


def report_steps(rank: RankContext) -> int:
    """Make steps of four samples and report each; hand over a file.

    Options: num_steps; kill: {attempt: [rank, step]}; fail_at: step; wait_at: the step in which all wait for an object of the
    storage.
    """
    torch.set_num_threads(1)
    num_steps = rank.options["num_steps"]
    model = rank.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank.track(model=model, optimizer=optimizer)
    loader = rank.loader(TensorDataset(torch.linspace(-1, 1, 2 * num_steps).unsqueeze(1)), global_batch_size=4)
    for (batch,) in rank.steps(loader, epochs=2):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rank.report(loss=loss, twice_step_plus_rank=2 * rank.step + rank.rank)
        if rank.step == 1 and rank.rank == 0:
            rank.save("notes/first-step.txt", "of attempt 1: é")
        _strike(rank)
    return rank.step


def _strike(rank: RankContext) -> None:
    options = rank.options
    if options.get("kill", {}).get(rank.attempt) == [rank.rank, rank.step]:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank.step == options.get("fail_at"):
        msg = f"told to fail at step {rank.step}"
        raise ValueError(msg)
    deadline = time.monotonic() + PATIENCE_S
    while rank.step == options.get("wait_at") and not _may_go_on(rank):
        assert time.monotonic() < deadline, "nobody let it go on"
        time.sleep(0.02)


def _may_go_on(rank: RankContext) -> bool:
    try:
        return bool(rank.config.storage.read(GO_ON))
    except ObjectNotFoundError:
        return False
