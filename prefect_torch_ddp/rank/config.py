"""Owns the description a RankContext is made from: equal on all ranks, picklable, free of
torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.params import CheckpointParams, Determinism, check_virtual_ranks
from prefect_torch_ddp.storage.protocol import Readable, Storage

Stage = Literal["prepare", "train", "evaluate", "task"]


@dataclass(frozen=True)
class RankConfig:
    """What the ranks of one gang share beyond torch.distributed."""

    run_id: str
    """Names the run's folder: `<storage>/runs/<run_id>/`."""
    attempt: int
    stage: Stage
    storage: Storage
    dataset_id: str | None = None
    """The dataset below `<storage>/datasets/` that ctx.data stands for."""
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    checkpoint: CheckpointParams = field(default_factory=CheckpointParams)
    resume_from: ResumePoint | None = None
    """Where to take the first checkpoint from when this run has none of its own."""
    restore_step: int | None = None
    """In the evaluate stage: the step of the checkpoint to restore."""
    restore_attempt: int | None = None
    """Who made it; None: the newest attempt whose checkpoint of that step counts."""
    evaluate_on: Literal["last", "best"] = "last"
    """Which checkpoint's model a finished training leaves to others."""
    determinism: Determinism = "default"
    """"elastic": a training's bits are the same for every number of ranks that divides
    `virtual_ranks`."""
    virtual_ranks: int | None = None
    ledger: bool = False
    """Whether each step's samples are put on record."""
    source: Readable | None = None
    """Where the raw data is."""

    def __post_init__(self) -> None:
        """Refuse virtual ranks that can't be."""
        check_virtual_ranks(self.determinism, self.virtual_ranks)
