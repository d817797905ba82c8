"""Owns what a rank knows of itself and of how far its training is; free of torch."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from prefect_torch_ddp.protocol.events import StoppedBy

if TYPE_CHECKING:
    from prefect_torch_ddp.data.sampler import BatchShare
    from prefect_torch_ddp.rank.gradients.elastic import VirtualRanks


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
    """Says in words which order of samples the batches are of; another one can't be gone on
    with."""
    stopped_early: bool = False
    """Whether the training itself asked to stop here, so that resuming it adds nothing."""
    num_own_saves: int = 0
    """Checkpoints outside of `steps` that have a number of their own, since their step's was
    taken."""
    is_behind: bool = False
    """Whether the checkpoint was asked for behind this call of `steps`: it has ended, also
    where it was left half-way."""
    in_own_loop: bool = False
    """Whether `steps` had not begun: the generators are those of the user's own loop, which
    goes on behind `track`."""

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
    """The DDP modules of `ctx.wrap`."""
    virtual: "VirtualRanks | None" = None
    """Set in a training with elastic determinism."""
    owes_gradients: bool = False
    """Micro-batches of the step under way are done, and the ranks haven't summed their
    gradients yet."""
    trouble: Callable[[], str] = field(default=str)
    """Says, on rank 0, what people should know of the training, or nothing."""
    saved: int | None = None
    """The number of the newest checkpoint that was begun or restored; None where there is none
    of this run."""

    _num_before: int | None = None

    @property
    def checkpoint_number(self) -> int:
        """The number by which a checkpoint made now is known: the step, and beyond it those
        that were made outside of `steps`.
        """
        return self.step + self.position.num_own_saves

    @property
    def record_step(self) -> int:
        """The step of what is reported now. A loop of the user's own has no steps: what follows
        a checkpoint counts as the next.

        So a resume takes back what was reported behind its checkpoint, and nothing else.
        """
        if self.step > 0 or self.share is not None:
            return self.step
        return self.checkpoint_number + (self.saved == self.checkpoint_number)

    def take_number(self, number: int) -> None:
        """Have the checkpoint of this step known by a number."""
        self.position = replace(self.position, num_own_saves=number - self.step)

    def take_next_number(self) -> None:
        """Give the next checkpoint a number of its own where this step's is taken."""
        self._num_before = self.position.num_own_saves
        if self.saved == self.checkpoint_number:
            self.take_number(self.checkpoint_number + 1)

    def give_number_back(self) -> None:
        """Count the newest checkpoint outside of `steps` as none."""
        if self._num_before is not None:
            self.position = replace(self.position, num_own_saves=self._num_before)
            self.saved = self.checkpoint_number
