"""Owns what a rank knows of itself and of how far its training is; free of torch."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from prefect_torch_ddp.messages import StoppedBy

if TYPE_CHECKING:
    from prefect_torch_ddp.data.sampler import BatchShare
    from prefect_torch_ddp.rank.elastic import VirtualRanks


@dataclass(frozen=True)
class Place:
    """Which rank this is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @classmethod
    def from_environment(cls) -> Self:
        """Read torchrun's environment variables, which every rank has."""
        return cls(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
            node_rank=int(os.environ["GROUP_RANK"]),
        )


@dataclass(frozen=True)
class Position:
    """Where a training goes on: the next batch it would take."""

    loop: int = 0
    """Which call of `steps` it is, from 0."""
    loop_epoch: int = 0
    """Epochs that this call has completed."""
    epoch: int = 0
    """Epochs that all calls have completed; numbers the order of the samples."""
    batch: int = 0
    """Global batches of the current epoch that are done."""
    global_batch_size: int = 0
    order: str = ""
    """Says in words which order of samples the batches are of; another one can't be gone on with."""
    stopped_early: bool = False
    """Whether the training itself asked to stop here, so that resuming it adds nothing."""

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild it."""
        return cls(**values)


@dataclass
class TrainingState:
    """How far the training is, shared by the parts of one rank."""

    step: int = 0
    epoch: int = 0
    epoch_ended: bool = False
    position: Position = field(default_factory=Position)
    share: "BatchShare | None" = None
    """The share of the step under way; None outside of the loop."""
    total_steps: int | None = None
    stop_wanted: bool = False
    """This rank's training asked to stop."""
    stop_agreed: bool = False
    stopped_by: StoppedBy | None = None
    """Set when all ranks agreed to stop and the training itself had not asked for it."""
    save_wanted: bool = False
    """A checkpoint was asked for at the end of this step."""
    wrapped: list[Any] = field(default_factory=list)
    """The DDP modules of `rank.wrap`."""
    virtual: "VirtualRanks | None" = None
    """Set in a training with elastic determinism."""
    owes_gradients: bool = False
    """Micro-batches of the step under way are done, and the ranks haven't summed their gradients yet."""
    trouble: Callable[[], str] = field(default=str)
    """Says, on rank 0, what people should know of the training, or nothing."""
