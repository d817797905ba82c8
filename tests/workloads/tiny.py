"""The smallest whole workload: a linear classifier of points, quick to train, that fails or
waits on request."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext, Report
from tests.workloads import descend, score_linear, wait_for_checkpoint, write_pid

CLASSES = ["below", "above"]


def prepare(ctx: RankContext) -> None:
    """Write points in the plane, labelled by the line they lie below or above."""
    linger_if_told(ctx, "prepare")
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
        write_pid(ctx.options["pid_folder"], ctx.rank)
    for points, labels in ctx.steps(loader, epochs=ctx.options.get("epochs", 3)):
        fail_if_told(ctx)
        descend(ctx, optimizer, cross_entropy(model(points), labels))
        if ctx.step < 1000:
            print(f"step {ctx.step}")
    return {"steps": ctx.step}


def fail_if_told(ctx: RankContext, fault: Mapping[str, Any] | None = None) -> None:
    """Raise, wait or be killed, as `options["fault"]` or the argument says: {"how", "step", "rank",
    "attempts"}; a rank of None means all."""
    fault = fault or ctx.options.get("fault")
    if (
        not fault
        or fault["rank"] not in (None, ctx.rank)
        or ctx.step != fault["step"]
        or ctx.attempt not in fault["attempts"]
    ):
        return
    how = fault["how"]
    if how == "raise":
        msg = "told to fail"
        raise ValueError(msg)
    if how in ("kill_grandparent", "stop_grandparent", "pause", "hang"):
        wait_for_checkpoint(ctx, fault["step"])
        if "mark" in fault:
            write_pid(fault["mark"], ctx.rank)
        if how.endswith("grandparent"):
            number = signal.SIGKILL if how == "kill_grandparent" else signal.SIGSTOP
            os.kill(dask_worker_of(os.getpid()), number)
        signal.pause()
        while how == "hang":
            signal.pause()  # returns at each signal, also at the one that asks for stacks
    os.kill(os.getpid(), signal.Signals[how])


def linger_if_told(ctx: RankContext, stage: str) -> None:
    """Leave the rank's pid and wait for ever, if `options["linger"]` names this stage; with a file
    `while` in it, only if that is there."""
    linger = ctx.options.get("linger")
    if linger and linger["stage"] == stage and Path(linger.get("while", "/")).exists():
        write_pid(linger["pids"], ctx.rank)
        while True:
            signal.pause()


def dask_worker_of(rank_pid: int) -> int:
    """Return the Dask worker's pid: the parent of the fork server, or of a fresh rank."""
    parent = psutil.Process(rank_pid).parent()
    while parent is not None and "prefect_torch_ddp.rank.process.fork_server" in parent.cmdline():
        parent = parent.parent()
    assert parent is not None
    return parent.pid


def evaluate(ctx: RankContext) -> Report:
    """Score on the held-out points; fail once if `options["fail_evaluation_once"]` names a file
    that isn't there yet, or with `options["kills_worker"]` kill the Dask worker."""
    linger_if_told(ctx, "evaluate")
    marker = ctx.options.get("fail_evaluation_once")
    if marker and not Path(marker).exists():
        Path(marker).touch()
        if ctx.options.get("kills_worker"):
            os.kill(dask_worker_of(os.getpid()), signal.SIGKILL)
            signal.pause()
        msg = "told to fail once"
        raise ValueError(msg)
    return score_linear(ctx, read(ctx, "test"), CLASSES)


def read(ctx: RankContext, split: str) -> TensorDataset:
    """Read points float32 [n, 2] and labels int64 [n]."""
    arrays = np.load(ctx.data / f"{split}.npz")
    return TensorDataset(torch.from_numpy(arrays["points"]), torch.from_numpy(arrays["labels"]))


class Steered:
    """The same, trained until a file in `options["folder"]`, `enough`, ends it: `step` in it is
    the newest one, `<rank>` a pid."""

    prepare, evaluate = staticmethod(prepare), staticmethod(evaluate)

    @staticmethod
    def train(ctx: RankContext) -> dict[str, Any]:
        folder = Path(ctx.options["folder"])
        model = ctx.wrap(torch.nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ctx.track(model=model, optimizer=optimizer)
        write_pid(folder, ctx.rank)
        loader = ctx.loader(read(ctx, "train"), global_batch_size=8)
        for points, labels in ctx.steps(loader, epochs=100_000):
            fail_if_told(ctx)
            descend(ctx, optimizer, cross_entropy(model(points), labels))
            time.sleep(0.02)  # the pace of a step with work in it
            if ctx.rank == 0:
                write_pid(folder, "step", ctx.step)
            if (folder / "enough").exists():
                ctx.request_stop("told to")
        return {"steps": ctx.step}


class Noting:
    """The same; its evaluation saves the step of the weights that it scores."""

    prepare, train = staticmethod(prepare), staticmethod(train)

    @staticmethod
    def evaluate(ctx: RankContext) -> Report:
        report = score_linear(ctx, read(ctx, "test"), CLASSES)
        if ctx.rank == 0:
            ctx.save("step.txt", str(ctx.step))
        return report
