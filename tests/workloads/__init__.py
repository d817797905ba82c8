"""What ranks run in tests, and what several of these trainings do."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from prefect_torch_ddp import RankContext, Report


def descend(ctx: "RankContext", optimizer: Any, loss: Any) -> None:
    """Take the optimizer's step down the loss, and report it."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ctx.report(loss=loss)


def score_linear(ctx: "RankContext", held_out: "Dataset[Any]", classes: list[str]) -> "Report":
    """Score a tracked linear classifier of points in the plane."""
    import torch

    from prefect_torch_ddp import ClassificationMeter

    model = torch.nn.Linear(2, len(classes))
    ctx.track(model=model)
    meter = ClassificationMeter(classes)
    with torch.no_grad():
        for points, labels in ctx.loader(held_out, global_batch_size=8, shuffle=False):
            meter.update(model(points), labels)
    return meter.report()


def write_pid(folder: str | Path, name: object, pid: object = None) -> None:
    """Leave this process's pid, or something else, for the test: the file is whole from its
    start."""
    path = Path(folder, str(name))
    path.with_suffix(".tmp").write_text(str(pid or os.getpid()))
    path.with_suffix(".tmp").rename(path)


def wait_for_checkpoint(ctx: "RankContext", before_step: int, not_before: int = 0) -> None:
    """Wait until a checkpoint of an earlier step is on record: else there may be none to resume
    from, or one that is older than the test wants."""
    from prefect_torch_ddp.checkpoint.manifest import list_manifests

    wanted = range(not_before, before_step)
    while not any(c.step in wanted for c in list_manifests(ctx.config.storage, ctx.run_id)):
        time.sleep(0.02)
