"""A workload in one file with the call that runs it, as people write it: its module
imports Prefect."""

import logging

from prefect_torch_ddp import RankContext, Report, train_flow
from tests.workloads import tiny

__all__ = ["evaluate", "prepare", "train", "train_flow"]

prepare = tiny.prepare


def train(ctx: RankContext) -> dict[str, object]:
    """Log, then train."""
    logging.getLogger("user.code").info("logged by user code")
    return tiny.train(ctx)


def evaluate(ctx: RankContext) -> Report:
    """Score on the held-out points."""
    return tiny.evaluate(ctx)
