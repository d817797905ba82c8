"""A workload whose stages wait for ever where they are told to, for tests that cancel a
run there."""

import signal
from pathlib import Path
from typing import Any

from prefect_torch_ddp import RankContext, Report
from tests.workloads import tiny


def prepare(ctx: RankContext) -> None:
    """Write tiny's points."""
    linger_in("prepare", ctx)
    tiny.prepare(ctx)


def train(ctx: RankContext) -> dict[str, Any]:
    """Train on them."""
    return tiny.train(ctx)


def evaluate(ctx: RankContext) -> Report:
    """Evaluate on others."""
    linger_in("evaluate", ctx)
    return tiny.evaluate(ctx)


def linger_in(stage: str, ctx: RankContext) -> None:
    """Leave the rank's pid and wait, if it is this stage that `data_options["linger"]`
    names."""
    if ctx.options["linger"]["stage"] == stage:
        tiny.write_pid(Path(ctx.options["linger"]["pids"]), ctx.rank)
        while True:
            signal.pause()
