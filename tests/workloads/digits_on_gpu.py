"""The digits as a workload that fails where its ranks aren't on a CUDA device."""

from typing import Any

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.examples import digits


def prepare(ctx: RankContext) -> None:
    """Write the digits."""
    digits.prepare(ctx)


def train(ctx: RankContext) -> dict[str, Any]:
    """Train on CUDA."""
    assert ctx.device.type == "cuda"
    return dict(digits.train(ctx))


def evaluate(ctx: RankContext) -> Report:
    """Evaluate on CUDA."""
    assert ctx.device.type == "cuda"
    return digits.evaluate(ctx)
