"""Owns a workload whose stages wait for ever where they are told to, for tests that cancel a run there."""

import signal
from pathlib import Path
from typing import Any

from prefect_torch_ddp import RankContext, Report
from tests.workloads import tiny


def prepare(rank: RankContext) -> None:
    """Write tiny's points."""
    linger_in("prepare", rank)
    tiny.prepare(rank)


def train(rank: RankContext) -> dict[str, Any]:
    """Train on them."""
    return tiny.train(rank)


def evaluate(rank: RankContext) -> Report:
    """Evaluate on others."""
    linger_in("evaluate", rank)
    return tiny.evaluate(rank)


def linger_in(stage: str, rank: RankContext) -> None:
    """Leave the rank's pid and wait, if it is this stage that `data_options["linger"]` names."""
    if rank.options["linger"]["stage"] == stage:
        tiny.write_pid(Path(rank.options["linger"]["pids"]), rank.rank)
        while True:
            signal.pause()
