"""The progress of a training, shared by the parts of one rank; free of torch.

And what is refused or warned of where it doesn't fit the code: what stands behind finished calls of
`steps` runs again on resume, and may decide otherwise.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.events import StoppedBy
from prefect_torch_ddp.storage.formats import build

if TYPE_CHECKING:
    from prefect_torch_ddp.data.sampler import BatchShare
    from prefect_torch_ddp.params import CheckpointParams

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
    num_own_numbers: int = 0
    """Checkpoints outside of `steps` that have a number of their own: their step's was taken."""
    num_saves_behind: int = 0
    """Checkpoints requested after this call of `steps`; above 0 it has ended, also by a break."""
    in_own_loop: bool = False
    """Whether `steps` had not begun: the generators are those of the user's own loop, which
    resumes at `track`."""

    def after_batch(self, *, is_last: bool) -> Self:
        """Return the position after a batch, the last one of its epoch or not."""
        if not is_last:
            return self._replace(batch=self.batch + 1)
        return self._replace(loop_epoch=self.loop_epoch + 1, epoch=self.epoch + 1, batch=0)

    def entered(self, loop: int, order: str, size: int, num_batches: int) -> Self:
        """Return the position in a loop that begins or resumes, with its loader's order and size.

        A later loop than this one continues no epoch.
        """
        position, batch = self, self.batch
        if loop > self.loop:
            fresh: dict[str, Any] = {"loop_epoch": 0, "batch": 0, "num_saves_behind": 0}
            position = self._replace(loop=loop, epoch=self.epoch + (batch > 0), **fresh)
        elif batch and self.order not in ("", order):
            logger.warning(
                "the checkpoint is from the midst of an epoch of %s, and the loader's are of %s: "
                "that epoch can't be finished, the next one begins",
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
        return position._replace(global_batch_size=size, order=order)


@dataclass
class TrainingState:
    """The progress of the training."""

    step: int = 0
    epoch: int = 0
    epoch_ended: bool = False
    position: Position = field(default_factory=Position)
    share: "BatchShare | None" = None
    """The share of the step under way; None outside of the loop."""
    passes_by: bool = False
    """Whether code behind a finished call of `steps`, before that of the checkpoint, runs again."""
    total_steps: int | None = None
    total_epochs: int | None = None
    stop_wanted: bool = False
    """This rank's training asked to stop."""
    stop_agreed: bool = False
    stopped_by: StoppedBy | None = None
    """Set when all ranks agreed to stop without a request of the training itself."""
    save_wanted: bool = False
    """A checkpoint was requested at the end of this step."""
    trouble: Callable[[], str] = field(default=str)
    """Says, on rank 0, what people should know of the training, or nothing."""
    saved: int | None = None
    """The number of this run's newest checkpoint, begun or restored."""
    rated: tuple[int, int] | None = None
    """The place of the best metric's report that the newest checkpoint has."""
    best_value: float = -math.inf
    """Of the best metric in this attempt's checkpoints; larger is better."""
    has_saved_late: bool = False
    """Whether a best value had no checkpoint with the weights that it was reported for."""
    ended_at: tuple[int, int | None] | None = None
    """Number and `saved` as restored from a checkpoint with which the function had ended."""

    @property
    def is_at_end(self) -> bool:
        """Whether the training had ended, and nothing was added since."""
        return self.ended_at == (self.checkpoint_number, self.saved)

    @property
    def is_one_epoch(self) -> bool:
        """Whether the last call of `steps` has one epoch, as in a loop over epochs around it."""
        before = self.position.epoch - self.position.loop_epoch
        return self.total_epochs is not None and self.total_epochs - before == 1

    @property
    def checkpoint_number(self) -> int:
        """The number of a checkpoint made now: the step, and beyond it those made outside."""
        return self.step + self.position.num_own_numbers

    @property
    def record_step(self) -> int:
        """The step of what is reported now.

        In a loop of the user's own it is the number of the next checkpoint, so that a resume takes
        back what was reported behind its checkpoint, and nothing else.
        """
        if self.step > 0 or self.share is not None:
            return self.step
        return self.report_place[0]

    @property
    def report_place(self) -> tuple[int, int]:
        """What a report has in common with no later one that another checkpoint can have.

        The number of the next checkpoint, and the step.
        """
        number = self.checkpoint_number
        return number + (self.saved == number), self.step

    def adopt(self, manifest: Manifest, *, is_ours: bool, had_ended: bool) -> None:
        """Continue from a checkpoint, of this run or of another one."""
        position = build(Position, manifest.position)
        self.step = manifest.step - position.num_own_numbers
        self.epoch = manifest.epoch
        self.position = position if is_ours else position._replace(stopped_early=False)
        self.saved = manifest.step if is_ours else None
        self.ended_at = (manifest.step, self.saved) if had_ended and is_ours else None

    def leave_step(self, *, is_last: bool) -> None:
        """End the step under way, the last one of its epoch or not."""
        self.position = self.position.after_batch(is_last=is_last)
        self.share, self.save_wanted = None, False

    def take_number(self, number: int) -> None:
        """Number the checkpoint of this step."""
        self.position = self.position._replace(num_own_numbers=number - self.step)

    def count_own_save(self, *, is_behind: bool) -> None:
        """Count a checkpoint outside of `steps`, perhaps behind one of its calls.

        It has a number of its own where this step's is taken.
        """
        if self.saved == self.checkpoint_number:
            self.take_number(self.checkpoint_number + 1)
        if is_behind:
            num_saves = self.position.num_saves_behind + 1
            self.position = self.position._replace(num_saves_behind=num_saves)


def refuse_to_end(state: TrainingState, num_calls: int, did: str) -> None:
    """Raise if the training ends before its checkpoint's call, unless it had ended before."""
    position, had_ended = state.position, state.is_at_end and state.saved is not None
    if not (position.stopped_early or had_ended):
        msg = (
            f"the training was resumed in call {position.loop + 1} of ctx.steps, and the "
            f"function {did} after {num_calls}: the code behind finished calls runs again, and "
            "decided otherwise. Use one call with epochs=N and ctx.epoch_ended, or track what the "
            "decision depends on and pass over finished calls"
        )
        raise InvalidParamsError(msg)


def warn_of_missed_save(state: TrainingState, num_calls: int, num_saves: int) -> None:
    """Warn if the checkpoint was asked for behind a call that is passed, and wasn't again."""
    position = state.position
    is_met = num_calls <= position.loop or num_saves >= position.num_saves_behind
    if is_met or state.is_at_end:
        return
    logger.warning(
        "the checkpoint was asked for behind call %d of ctx.steps, and on resume it was not asked "
        "for again: what the code behind that call changed in tracked objects afterwards is "
        "undone; ask for it unconditionally, or in the loop: ctx.checkpoint(force=ctx.epoch_ended)",
        position.loop + 1,
    )


def rate_checkpoint(
    state: TrainingState,
    policy: "CheckpointParams",
    newest: Mapping[str, float],
    reports: Mapping[str, tuple[int, int]],
) -> None:
    """Note the best metric of a checkpoint; warn, once, if a best value is of other weights."""
    metric = policy.best_metric or ""
    if metric not in newest or reports.get(metric) == state.rated:
        return
    value = newest[metric] * (1 if policy.best_mode == "max" else -1)
    number, step = state.rated = reports[metric]
    if not value > state.best_value:  # nor where it is a nan
        return
    state.best_value = value
    # A baseline of untrained weights is left out: nobody wants those.
    is_late = 0 < step < state.step or (state.step == 0 and number < state.checkpoint_number)
    if is_late and not state.has_saved_late:
        state.has_saved_late = True
        logger.warning(
            "%s was reported in step %d, and the first checkpoint since is of step %d: it counts "
            "with that value, but its weights are others than those validated. For the best "
            "weights ask for a checkpoint where you report it: ctx.checkpoint(force=True), or in "
            "the loop ctx.checkpoint(force=ctx.epoch_ended)",
            metric,
            step or number,
            state.step or state.checkpoint_number,
        )


def warn_of_unwritten_save(state: TrainingState) -> None:
    """Warn, where a loop is left within a step, if that step asked for a checkpoint."""
    if state.save_wanted:
        logger.warning(
            "the checkpoint that was asked for in step %d has not been written: its loop was left "
            "before the step's end. Ask for it behind the loop, whose iterator no variable may "
            "hold: write enumerate(ctx.steps(...)) in the for line",
            state.step,
        )
