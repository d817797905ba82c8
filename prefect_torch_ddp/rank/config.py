"""Owns the description a RankContext is made from: equal on all ranks, picklable, free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prefect_torch_ddp.storage.protocol import Storage

Stage = Literal["prepare", "train", "evaluate", "task"]


@dataclass(frozen=True)
class CheckpointPolicy:
    """When checkpoints are written and which are kept."""

    every_steps: int | None = None
    every_s: float | None = 60.0
    keep_last: int = 2
    keep_best: int = 1
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"
    on_failure: Literal["warn", "fail"] = "warn"
    """Whether a training goes on when a checkpoint can't be written; the last one of a training is an error in any case."""


@dataclass(frozen=True)
class RankConfig:
    """What the ranks of one gang share beyond torch.distributed."""

    run_id: str
    """Names the run's folder: `<storage>/runs/<run_id>/`."""
    attempt: int
    stage: Stage
    storage: Storage
    dataset_id: str | None = None
    """The dataset below `<storage>/datasets/` that rank.data stands for."""
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    resume_from: str | None = None
    """Run id to take the first checkpoint from when this run has none of its own."""
    restore_step: int | None = None
    """In the evaluate stage: the step of the checkpoint to restore."""
    evaluate_on: Literal["last", "best"] = "last"
    """Which checkpoint's model a finished training leaves to others."""
