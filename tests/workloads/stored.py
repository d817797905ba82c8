"""Trainings whose storage fails, falls silent or stops them, and which show what it then has."""

import logging
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.attempts import newest_attempt
from prefect_torch_ddp.errors import ObjectNotFoundError, SupersededError
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.storage.s3 import storage as s3_storage
from tests.support.waiting import wait_until
from tests.workloads import descend
from tests.workloads.healthy import sha256_of_weights

NUM_STEPS = 12
"""Of `leave_all`."""
FAILS_AT, RESUMES_FROM = 7, 6
"""Checkpoints come every other step."""
PART_BYTES = 5 * 2**20
NOTE = b"what user code saved"
ROOM_BYTES = 192 * 1024
"""What a filled disk has left: too little for a checkpoint's model, enough for its small objects
and all records: rank 1, which writes those, must not fail before rank 0 has swept them."""
GO_ON = "go-on"


def leave_all(ctx: RankContext, fails: bool, is_big: bool) -> dict[str, Any]:
    """Train on two ranks; leave checkpoints, records and a file.

    Args:
        ctx: the context.
        fails: whether rank 0 raises in step 7, when the checkpoint of step 6 is on record.
        is_big: whether its checkpoints are uploaded to S3 in parts.
    """
    if is_big:
        s3_storage.MULTIPART_FROM_BYTES = s3_storage.PART_BYTES = PART_BYTES
    torch.manual_seed(3)
    width = 1200 if is_big else 16
    bare = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1200)).double()
    model = ctx.wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(12, 8, generator=generator, dtype=torch.float64)
    first = None
    for (batch,) in ctx.steps(
        ctx.loader(TensorDataset(inputs), global_batch_size=4), epochs=NUM_STEPS // 3
    ):
        first = first or ctx.step
        if fails and ctx.rank == 0 and ctx.step == FAILS_AT:
            ctx._assembly.saver._checkpointer.wait()
            msg = "as the test wants it"
            raise RuntimeError(msg)
        descend(ctx, optimizer, model(batch).square().mean())
    if ctx.rank == 0:
        ctx.save("note.txt", NOTE)
    return {"sha256": sha256_of_weights(bare), "first": first}


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
    bare = nn.Linear(64, 512).double()
    model = ctx.wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    ctx.track(model=model, scheduler=scheduler, optimizer=optimizer)
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(12, 64, generator=generator, dtype=torch.float64)
    troubles = {}
    for (batch,) in ctx.steps(ctx.loader(TensorDataset(inputs), global_batch_size=4), epochs=3):
        ctx._assembly.saver._checkpointer.wait()  # what became of the checkpoint before is known
        troubles[ctx.step] = ctx._assembly.saver.trouble()
        if ctx.rank == 0 and ctx.step in plan:
            strike(plan[ctx.step], Path(place))
        descend(ctx, optimizer, model(batch).square().mean())
        scheduler.step()
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


@dataclass(frozen=True)
class PausingStorage(DirectoryStorage):
    """A directory whose process stops (SIGSTOP) right before a request for a key that contains
    a text."""

    request: str = ""
    text: str = ""

    def _maybe_stop(self, request: str, key: str) -> None:
        if request == self.request and self.text in key:
            os.kill(os.getpid(), signal.SIGSTOP)

    def write(self, key: str, data: bytes) -> None:
        self._maybe_stop("write", key)
        super().write(key, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        self._maybe_stop("write_if_absent", key)
        return super().write_if_absent(key, data)

    def delete(self, key: str) -> None:
        self._maybe_stop("delete", key)
        super().delete(key)


@dataclass(frozen=True)
class Course:
    """How an attempt goes."""

    num_steps: int
    every_steps: int = 1
    die_at: int | None = None
    """Die after this step, without a word."""
    wait_at: int | None = None
    """Make no further step before there is a newer attempt."""


def race(storage: Storage, course: Course) -> tuple[str, str]:
    """Claim an attempt and train; return "done" and the weights' digest, or "superseded" and
    the error's text."""
    torch.set_num_threads(1)
    policy = CheckpointParams(every_steps=course.every_steps, every_s=None, keep_last=2)
    try:
        with RankContext.local(storage=storage, run_id="run", checkpoint=policy) as ctx:
            return "done", _race(ctx, course)
    except SupersededError as error:
        return "superseded", str(error)


def _race(ctx: RankContext, course: Course) -> str:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ctx.track(model=model, optimizer=optimizer)
    inputs = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    loader = ctx.loader(TensorDataset(inputs), global_batch_size=1)
    for (batch,) in ctx.steps(loader, epochs=course.num_steps // 4):
        ctx._assembly.saver._checkpointer.wait()  # what became of the checkpoint before is known
        descend(ctx, optimizer, nn.functional.dropout(model(batch), 0.3).square().mean())
        ctx.save("newest.txt", f"attempt {ctx.attempt}")
        if ctx.step == course.die_at:
            os._exit(1)
        if ctx.step == course.wait_at:
            wait_until(lambda: newest_attempt(ctx.config.storage, "run") > ctx.attempt)
    return sha256_of_weights(model)


def train_beside_silence(ctx: RankContext, folder: str, how: str) -> int:
    """Have the storage fall silent in step 3, and while something waits for it fail in step 6;
    or train to the end.

    Args:
        ctx: this rank.
        folder: a file "silent" in it silences the storage, for as long as it is there; "asked"
            says that something waits.
        how: "fails" or "goes on".
    """
    model = ctx.wrap(nn.Linear(1, 1))
    ctx.track(model=model)
    for (x,) in ctx.steps(
        ctx.loader(TensorDataset(torch.ones(24, 1)), global_batch_size=2), epochs=1
    ):
        model(x).sum().backward()
        ctx.report(loss=1.0)
        ctx.checkpoint(force=ctx.step in (4, 10))
        _pass_by(ctx, Path(folder), how)
    return ctx.step


def _pass_by(ctx: RankContext, folder: Path, how: str) -> None:
    match ctx.step, ctx.rank, how:
        case (3, 0, _):
            (folder / "silent").touch()
        case (6, 1, "fails"):
            wait_until((folder / "asked").exists)
            msg = "a bug of the user's"
            raise ValueError(msg)
        case (6, 0, "goes on"):
            wait_until((folder / "asked").exists)
            (folder / "on").touch()
        case (8, _, "goes on"):
            wait_until(lambda: not (folder / "silent").exists())


def report_steps(ctx: RankContext) -> int:
    """Make steps of four samples and report each; hand over a file.

    Options: num_steps; kill: {attempt: [rank, step]}; wait_at: the step in which all wait for an
    object of the storage.
    """
    torch.set_num_threads(1)
    num_steps = ctx.options["num_steps"]
    model = ctx.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(
        TensorDataset(torch.linspace(-1, 1, 2 * num_steps).unsqueeze(1)), global_batch_size=4
    )
    for (batch,) in ctx.steps(loader, epochs=2):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss, twice_step_plus_rank=2 * ctx.step + ctx.rank)
        if ctx.step == 1 and ctx.rank == 0:
            ctx.save("notes/first-step.txt", f"of attempt {ctx.attempt}: é")
        _strike(ctx)
    return ctx.step


def _strike(ctx: RankContext) -> None:
    options = ctx.options
    if options.get("kill", {}).get(ctx.attempt) == [ctx.rank, ctx.step]:
        os.kill(os.getpid(), signal.SIGKILL)
    if ctx.step == options.get("wait_at"):
        wait_until(lambda: _may_go_on(ctx), what="go on")


def _may_go_on(ctx: RankContext) -> bool:
    try:
        return bool(ctx.config.storage.read(GO_ON))
    except ObjectNotFoundError:
        return False
