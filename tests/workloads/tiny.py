"""The smallest whole workload: a linear classifier of points, quick to train, that fails
where it is told to."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.checkpoint.manifest import list_checkpoints
from prefect_torch_ddp.rank.evaluation import ClassificationMeter

CLASSES = ["below", "above"]


def prepare(ctx: RankContext) -> None:
    """Write points in the plane, labelled by the line they lie below or above."""
    generator = np.random.default_rng(0)
    for split, size in (("train", ctx.options.get("num_samples", 50)), ("test", 21)):
        points = generator.normal(size=(size, 2)).astype(np.float32)
        np.savez(
            ctx.data / f"{split}.npz", points=points, labels=(points.sum(1) > 0).astype(np.int64)
        )


def train(ctx: RankContext) -> dict[str, Any]:
    """Train; fail at the step and on the rank that the options name, in the attempts they
    name."""
    torch.manual_seed(ctx.seed)
    model = ctx.wrap(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(read(ctx, "train"), global_batch_size=8)
    if "pid_folder" in ctx.options:
        write_pid(Path(ctx.options["pid_folder"]), ctx.rank)
    for points, labels in ctx.steps(loader, epochs=ctx.options.get("epochs", 3)):
        fail_if_told(ctx)
        loss = cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
        if ctx.step < 1000:
            print(f"step {ctx.step}")
    return {"steps": ctx.step}


def write_pid(folder: Path, rank: int) -> None:
    """Leave this rank's pid for the test."""
    path = folder / str(rank)
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)


def fail_if_told(ctx: RankContext) -> None:
    """Raise or be killed, as `options["fault"]` says: {"how", "step", "rank", "attempts"}."""
    fault = ctx.options.get("fault")
    if (
        fault
        and ctx.rank == fault["rank"]
        and ctx.step == fault["step"]
        and ctx.attempt in fault["attempts"]
    ):
        if fault["how"] == "raise":
            msg = "told to fail"
            raise ValueError(msg)
        if fault["how"] in ("kill_grandparent", "stop_grandparent", "pause"):
            wait_for_checkpoint(ctx, fault["step"])
            if fault["how"] == "pause":
                write_pid(Path(fault["mark"]), ctx.rank)
            else:
                os.kill(
                    dask_worker_of(os.getpid()),
                    signal.SIGKILL if fault["how"] == "kill_grandparent" else signal.SIGSTOP,
                )
            signal.pause()
        if fault["how"] == "hang":
            wait_for_checkpoint(ctx, fault["step"])
            if "mark" in fault:
                write_pid(Path(fault["mark"]), ctx.rank)
            while True:
                signal.pause()  # returns at each signal, also at the one that asks for stacks
        os.kill(os.getpid(), signal.Signals[fault["how"]])


def wait_for_checkpoint(ctx: RankContext, before_step: int) -> None:
    """Wait until a checkpoint of an earlier step is on record."""
    while not any(
        ref.step < before_step for ref in list_checkpoints(ctx.config.storage, ctx.run_id)
    ):
        time.sleep(0.05)


def dask_worker_of(rank_pid: int) -> int:
    """Return the Dask worker's pid: the parent of the fork server, or of a fresh rank."""
    parent = psutil.Process(rank_pid).parent()
    while parent is not None and "prefect_torch_ddp.rank.fork_server" in parent.cmdline():
        parent = parent.parent()
    assert parent is not None
    return parent.pid


def evaluate(ctx: RankContext) -> Report:
    """Score on the held-out points; fail once if `options["fail_evaluation_once"]` names a file
    that isn't there yet."""
    marker = ctx.options.get("fail_evaluation_once")
    if marker and not Path(marker).exists():
        Path(marker).touch()
        msg = "told to fail once"
        raise ValueError(msg)
    model = torch.nn.Linear(2, 2)
    ctx.track(model=model)
    meter = ClassificationMeter(CLASSES)
    with torch.no_grad():
        for points, labels in ctx.loader(read(ctx, "test"), global_batch_size=8, shuffle=False):
            meter.update(model(points), labels)
    return meter.report()


def read(ctx: RankContext, split: str) -> TensorDataset:
    """Read points float32 [n, 2] and labels int64 [n]."""
    arrays = np.load(ctx.data / f"{split}.npz")
    return TensorDataset(torch.from_numpy(arrays["points"]), torch.from_numpy(arrays["labels"]))
