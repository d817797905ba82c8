"""Trainings whose storage fails while they run, and how it is made to: a disk filled,
remounted, a server told to fail."""

import logging
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from tests.workloads.healthy import sha256_of_weights

NUM_STEPS = 9
ROOM_BYTES = 48 * 1024
"""What a filled disk has left: enough for the small objects of a checkpoint, too little for the
model's."""


def train_through(ctx: RankContext, place: str, plan: dict[int, str]) -> dict[str, Any]:
    """Train nine steps with a checkpoint each; rank 0 does to the storage what the plan says,
    before the step's checkpoint.

    Args:
        ctx: the context; its checkpoints come every step.
        place: the mounted file system, a file whose presence makes the server fail, or the
            configuration of a Ceph cluster.
        plan: by step "fill", "free", "ro", "rw", "down", "up", "pause" or "unpause".

    Returns:
        The weights' digest, what was logged, and by step the trouble that people were told of.
    """
    said = _Listener()
    logging.getLogger("prefect_torch_ddp").addHandler(said)
    torch.manual_seed(3)
    bare = nn.Linear(64, 128).double()
    model = ctx.wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    ctx.track(model=model, scheduler=scheduler, optimizer=optimizer)
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(12, 64, generator=generator, dtype=torch.float64)
    troubles = {}
    for (batch,) in ctx.steps(
        ctx.loader(TensorDataset(inputs), global_batch_size=4), epochs=NUM_STEPS // 3
    ):
        ctx._parts.tracker._checkpointer.wait()  # what became of the checkpoint before is known
        troubles[ctx.step] = ctx._state.trouble()
        if ctx.rank == 0 and ctx.step in plan:
            strike(plan[ctx.step], Path(place))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ctx.report(loss=loss)
    return {"sha256": sha256_of_weights(bare), "said": said.lines, "troubles": troubles}


def strike(how: str, place: Path) -> None:
    """Break the storage, or repair it."""
    filler = place / "filler"
    match how:
        case "fill":
            _fill(filler)
        case "free":
            filler.unlink()
        case "ro" | "rw":
            command = ["mount", "-o", f"remount,{how}", str(place)]
            while subprocess.run(command, check=False, capture_output=True).returncode:
                pass  # metrics are being written at this moment
        case "down":
            place.touch()
        case "up":
            place.unlink()
        case "pause" | "unpause":
            order = "set" if how == "pause" else "unset"
            subprocess.run(
                ["ceph", "--conf", str(place), "osd", order, "pause"],
                check=True,
                capture_output=True,
            )


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with filler.open("r+b") as file:
        file.truncate(filler.stat().st_size - ROOM_BYTES)


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
