"""What a RankContext is made from: the run, equal on all ranks, and which rank this is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.params import CheckpointParams, Determinism, check_virtual_ranks
from prefect_torch_ddp.records.saved_files import attempt_folder
from prefect_torch_ddp.results import DatasetReport
from prefect_torch_ddp.storage.protocol import Readable, Storage

Stage = Literal["prepare", "train", "evaluate", "task"]


@dataclass(frozen=True)
class RankConfig:
    """The run as all its ranks see it; picklable, free of torch."""

    run_id: str
    """Names the run's folder: `<storage>/runs/<run_id>/`."""
    attempt: int
    stage: Stage
    storage: Storage
    dataset_id: str | None = None
    """The dataset below `<storage>/datasets/` that ctx.data shows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    checkpoint: CheckpointParams = field(default_factory=CheckpointParams)
    resume_from: ResumePoint | None = None
    """Where to take the first checkpoint from when this run has none of its own."""
    restore: ResumePoint | None = None
    """In the evaluate stage: the checkpoint to restore; None: the run's newest."""
    results: str | None = None
    """The folder of an evaluation's files among the run's results; None: the attempt's."""
    evaluate_on: Literal["last", "best"] = "last"
    """Which checkpoint's model a finished training leaves to others."""
    determinism: Determinism = "default"
    virtual_ranks: int | None = None
    ledger: bool = False
    """Whether each step's samples are recorded."""
    source: Readable | None = None
    """Where the raw data is."""
    source_dataset: DatasetReport | None = None
    """The tables of `source`, if they are the dataset."""

    def __post_init__(self) -> None:
        """Refuse virtual ranks that can't be."""
        check_virtual_ranks(self.determinism, self.virtual_ranks)

    @property
    def results_folder(self) -> str:
        """Where ctx.save writes to among the run's results."""
        return self.results or attempt_folder(self.attempt)

    @property
    def trains(self) -> bool:
        """Whether the stage is a training: it claims an attempt, writes checkpoints and records."""
        return self.stage in ("train", "task")

    def refuse_superseded(self) -> None:
        """Raise SupersededError if a newer attempt has been claimed; only a training claims any."""
        if self.trains:
            refuse_superseded(self.storage, self.run_id, self.attempt)

    @property
    def is_elastic(self) -> bool:
        """Whether it is a training with elastic determinism."""
        return self.determinism == "elastic" and self.trains


@dataclass(frozen=True)
class RankInfo:
    """Which rank this is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @classmethod
    def from_environment(cls) -> Self:
        """Read torchrun's environment variables, which every rank has."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        return cls(*(int(os.environ[name]) for name in names))
