"""The workload flows.cifar10 whose rank 1 is killed in the midst of its second epoch, once
a checkpoint is there."""

import os
import signal
import time
from typing import Any

from flows import cifar10
from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.checkpoint.manifest import list_checkpoints

PATIENCE_S = 60.0


def prepare(ctx: RankContext) -> None:
    """Prepare as it does."""
    cifar10.prepare(ctx)


def train(ctx: RankContext) -> dict[str, float | None]:
    """Train as it does; in attempt 1 rank 1 doesn't outlive what it reports of the step named
    by the option."""
    report, kill_at = ctx.report, ctx.options["kill_at"]
    ctx.options = {name: value for name, value in ctx.options.items() if name != "kill_at"}

    def report_and_die(**metrics: Any) -> None:
        report(**metrics)
        if (ctx.attempt, ctx.rank, ctx.step) == (1, 1, kill_at):
            deadline = time.monotonic() + PATIENCE_S
            while (
                not list_checkpoints(ctx.config.storage, ctx.run_id) and time.monotonic() < deadline
            ):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)

    ctx.report = report_and_die  # type: ignore[method-assign]
    return cifar10.train(ctx)


def evaluate(ctx: RankContext) -> Report:
    """Evaluate as it does."""
    ctx.options = {name: value for name, value in ctx.options.items() if name != "kill_at"}
    return cifar10.evaluate(ctx)
