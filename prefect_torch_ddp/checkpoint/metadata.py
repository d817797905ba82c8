"""Owns what a checkpoint is of, besides the tracked objects: who writes it, and at which moment
of the training. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prefect_torch_ddp.storage.protocol import Storage


@dataclass(frozen=True)
class Writer:
    """Which rank of which attempt writes, and where to."""

    storage: Storage
    run_id: str
    attempt: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class CheckpointMetadata:
    """What a checkpoint holds besides the tracked objects."""

    step: int
    """The number by which it is known: the optimizer steps, and beyond them the checkpoints
    that were made outside of them."""
    epoch: int
    position: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest values; those of rank 0 count."""
    is_last: bool = False
    """Whether the training ends with it; it may follow another one of the same step."""
    num_steps: int = 0
    """Optimizer steps alone.

    Where a rank left out a checkpoint outside of them, two moments of one number are not the
    same.
    """

    @property
    def turn(self) -> tuple[int, int]:
        """What grows with every checkpoint, and is the same on all ranks."""
        return 2 * self.step + self.is_last, self.num_steps

    def note_key(self, rank: int) -> str:
        """Return where a rank says what it wrote."""
        return f"written/{self.turn[0]}/{self.turn[1]}/{rank}"
