"""How far the loops of a training are: only `StepLoop` moves it; free of torch."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from prefect_torch_ddp.protocol.events import StoppedBy

if TYPE_CHECKING:
    from prefect_torch_ddp.data.sampler import BatchShare

logger = logging.getLogger(__name__)


class Position(NamedTuple):
    """Where a training resumes: the next batch it would take."""

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
    """Names the order of samples that the batches are of; only the same one can be continued."""
    stopped_early: bool = False
    """Whether the training itself asked to stop here, so that resuming it adds nothing."""
    loop_step: int = 0
    """Steps that this call has made."""
    is_whole: bool = False
    """Whether this call made all of its steps; one that was left by a break didn't."""
    meaning: Mapping[str, Sequence[Any]] | None = None
    """What the numbers of a table mean in this call; see `meaning_in`."""

    @property
    def is_between_epochs(self) -> bool:
        """Whether it is at an epoch's end; a call that only counts its steps never is."""
        return self.loop_epoch > 0 and self.batch == 0

    def after_batch(self, *, is_last: bool) -> Self:
        """Return the position after a batch, the last one of its epoch or not."""
        if not is_last:
            return self._replace(batch=self.batch + 1)
        return self._replace(loop_epoch=self.loop_epoch + 1, epoch=self.epoch + 1, batch=0)

    def entered_without_epochs(self, loop: int) -> Self:
        """Return the position in a call without a loader, which has no epochs."""
        position = self
        if loop > self.loop:
            position = self._at_loop(loop)
        elif self.order:
            logger.warning(
                "the checkpoint is from a call of ctx.steps over %s, but now that call has no "
                "loader: it starts from the beginning",
                self.order,
            )
            position = self._at_loop(loop)
        return position._replace(global_batch_size=0, order="")

    def entered(
        self, loop: int, order_of: Callable[[int], str], size: int, num_batches: int
    ) -> Self:
        """Return the position in a loop that begins or resumes, with its loader's order and size.

        A later loop than this one continues no epoch.

        Args:
            loop: which call of `steps` it is.
            order_of: names the order of an epoch.
            size: of the global batches.
            num_batches: of an epoch.
        """
        position, batch = self, self.batch
        if loop > self.loop:
            position = self._at_loop(loop)
        elif self.loop_step and not self.order:
            logger.warning(
                "the checkpoint is from a call of ctx.steps without a loader, but now that call "
                "has one: it starts from the beginning"
            )
            position = self._at_loop(loop)
        elif batch and self.order not in ("", order := order_of(self.epoch)):
            logger.warning(
                "the checkpoint is from the middle of an epoch of %s, but the loader has %s now: "
                "that epoch can't be finished, and the next one begins",
                self.order,
                order,
            )
            position = self.after_batch(is_last=True)
        elif batch and self.global_batch_size != size:
            done = batch * self.global_batch_size
            position = self._replace(batch=min(done // size, num_batches))
            if done % size:
                logger.warning(
                    "global_batch_size changed within an epoch: %d samples of it are seen twice",
                    done % size,
                )
        return position._replace(global_batch_size=size)

    def _at_loop(self, loop: int) -> Self:
        """Return the position at the beginning of a call; an epoch under way is not finished."""
        fresh: dict[str, Any] = {"loop_epoch": 0, "batch": 0, "loop_step": 0, "is_whole": False}
        return self._replace(loop=loop, epoch=self.epoch + (self.batch > 0), **fresh)


class Moment(NamedTuple):
    """Where a training is, at a step's end or outside of a step; equal on all ranks."""

    step: int
    """The last one that ended; 0: none has."""
    ended_epoch: int | None
    """The epoch that has just ended, from 1; None: none has."""
    is_saved: bool
    """Whether the newest checkpoint was made here."""


@dataclass
class LoopProgress:
    """The steps, epochs and batches of a training, and whether its loops have stopped."""

    step: int = 0
    epoch: int = 0
    epoch_ended: bool = False
    position: Position = field(default_factory=Position)
    share: "BatchShare | None" = None
    """The share of the step under way; None outside of the loop."""
    total_steps: float | None = None
    """Of all calls of `steps` so far; `math.inf`: the last one is left by a break."""
    total_epochs: float | None = None
    ended_by: StoppedBy | Literal["training"] | None = None
    """Who ended the loops; None: nobody, as far as all ranks agreed."""

    @property
    def has_stopped(self) -> bool:
        """Whether all ranks agreed to stop."""
        return self.ended_by is not None

    @property
    def stopped_by(self) -> StoppedBy | None:
        """Who stopped it from outside; None if the training itself did, or nobody."""
        return None if self.ended_by == "training" else self.ended_by

    @property
    def is_one_epoch(self) -> bool:
        """Whether the last call of `steps` has one epoch, as in a loop over epochs around it."""
        before = self.position.epoch - self.position.loop_epoch
        return self.total_epochs is not None and self.total_epochs - before == 1

    def moment(self, *, is_saved: bool) -> Moment:
        """Return where the training is, for the decision whether a checkpoint is due."""
        is_between = self.position.is_between_epochs and self.share is None
        epoch = self.position.epoch if is_between else None
        return Moment(self.step, epoch, is_saved)

    def continue_from(self, step: int, epoch: int, position: Position) -> None:
        """Begin where a checkpoint was made, of this run or of another one."""
        self.step, self.epoch, self.position = step, epoch, position
        self.epoch_ended = position.is_between_epochs

    def enter_call(
        self, loop: int, order_of: Callable[[int], str], size: int, num_batches: int
    ) -> None:
        """Enter a call of `steps`; see `Position.entered`."""
        self.position = self.position.entered(loop, order_of, size, num_batches)

    def enter_call_without_epochs(self, loop: int) -> None:
        """Enter a call of `steps` without a loader; see `Position.entered_without_epochs`."""
        self.position = self.position.entered_without_epochs(loop)

    def note_meaning(self, meaning: Mapping[str, Sequence[Any]] | None) -> None:
        """Take in what the numbers mean in the call that begins."""
        self.position = self.position._replace(meaning=meaning)

    def begin_loop(self, epochs: float, num_batches: int) -> float:
        """Take the length of the call of `steps`; return how many steps are left of it.

        Args:
            epochs: of the whole call; `math.inf` is taken too.
            num_batches: of an epoch.
        """
        num_epochs = epochs - self.position.loop_epoch
        left = num_epochs * num_batches - self.position.batch
        self.position = self.position._replace(is_whole=False)
        self.total_steps = self.step + max(left, 0)
        self.total_epochs = self.position.epoch + max(num_epochs, 0)
        return left

    def begin_counted(self, total: float) -> float:
        """Take the number of steps of the call of `steps`; return how many are left of it.

        Args:
            total: of the whole call; `math.inf` is taken too.
        """
        left = total - self.position.loop_step
        self.position = self.position._replace(is_whole=False)
        self.total_steps, self.total_epochs = self.step + max(left, 0), None
        return left

    def begin_epoch(self, order: str) -> None:
        """Begin, or continue, the epoch of the position, whose order has this name."""
        self.epoch = self.position.epoch + 1
        self.position = self.position._replace(order=order)

    def begin_step(self, share: "BatchShare") -> None:
        """Begin a step."""
        self.step += 1
        self.share, self.epoch_ended = share, share.is_last

    def leave_step(self, share: "BatchShare") -> None:
        """End the step under way, which had this share."""
        position = self.position._replace(loop_step=self.position.loop_step + 1)
        self.position = position.after_batch(is_last=share.is_last) if share.has_data else position
        self.share = None

    def end_epoch(self) -> None:
        """Complete an epoch that was resumed after its last batch."""
        if self.position.batch:
            self.position = self.position.after_batch(is_last=True)

    def end_call(self) -> None:
        """Note that the call of `steps` has made all of its steps."""
        self.position = self.position._replace(is_whole=True)

    def leave_loop(self) -> None:
        """Note that no step is under way any more, in whatever way the loop was left."""
        self.share = None

    def stop(self, ended_by: StoppedBy | Literal["training"]) -> None:
        """Take in that all ranks stop here."""
        self.ended_by = ended_by
        self.position = self.position._replace(stopped_early=ended_by == "training")


@dataclass
class Requests:
    """What user code asked for on this rank; the loop obeys at a step's end."""

    wants_stop: bool = False
    _wants_save: bool = False

    def ask_to_stop(self) -> None:
        """Have all ranks stop."""
        self.wants_stop = True

    def ask_for_save(self) -> None:
        """Have a checkpoint made at the end of the step under way."""
        self._wants_save = True

    def take_save(self) -> bool:
        """Return whether the step that ends asked for a checkpoint, and forget it."""
        wanted, self._wants_save = self._wants_save, False
        return wanted
