"""Owns the decision which checkpoints are kept. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prefect_torch_ddp.checkpoint.manifest import Manifest, ranked


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the newest ones, and the best ones by a metric."""

    keep_last: int = 2
    keep_best: int = 1
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"


def superfluous(manifests: Sequence[Manifest], retention: Retention) -> list[Manifest]:
    """Return those that may be deleted, oldest first; the newest is never among them."""
    by_step = sorted(manifests, key=lambda manifest: manifest.step)
    kept = {manifest.step for manifest in by_step[-max(retention.keep_last, 1) :]}
    if retention.best_metric is not None:
        kept |= {manifest.step for manifest in ranked(by_step, retention.best_metric, retention.best_mode)[: retention.keep_best]}
    return [manifest for manifest in by_step if manifest.step not in kept]
