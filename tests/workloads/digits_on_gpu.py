"""Owns the digits as a workload that fails where its ranks aren't on a CUDA device."""

from typing import Any

from flows import digits
from prefect_torch_ddp import RankContext, Report


def prepare(rank: RankContext) -> None:
    """Write the digits."""
    digits.prepare(rank)


def train(rank: RankContext) -> dict[str, Any]:
    """Train on CUDA."""
    assert rank.device.type == "cuda"
    return dict(digits.train(rank))


def evaluate(rank: RankContext) -> Report:
    """Evaluate on CUDA."""
    assert rank.device.type == "cuda"
    return digits.evaluate(rank)
