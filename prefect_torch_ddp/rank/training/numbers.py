"""The numbers of a training's checkpoints; what is reported belongs to one of them. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from prefect_torch_ddp.checkpoint.manifest import Manifest, Reported
from prefect_torch_ddp.rank.training.loop_progress import LoopProgress, Moment, Position
from prefect_torch_ddp.storage.formats import build


class OwnSaves(NamedTuple):
    """The checkpoints that user code asked for outside of `steps`; stored with the position."""

    num_own_numbers: int = 0
    """Checkpoints outside of `steps` that have their own number: their step's was taken."""
    num_saves_behind: int = 0
    """Checkpoints made on request after this call of `steps`; above 0 it has ended, also by a
    break."""
    in_own_loop: bool = False
    """Whether `steps` had not begun: the generators are those of the user's own loop, which
    resumes at `track`."""
    num_requests_behind: int = 0
    """Requests after this call, with those for which none was due; 0: not counted, as in the
    manifests of earlier versions."""

    def before_requests(self) -> Self:
        """Return the same as of a call of `steps` that hasn't ended."""
        return self._replace(num_saves_behind=0, num_requests_behind=0)


class OwnProgress(NamedTuple):
    """How far a loop is that isn't `ctx.steps`, as user code says."""

    step: int
    total: int | None
    epoch: int


@dataclass
class CheckpointNumbers:
    """Which number the next checkpoint has, and which one was the newest.

    Within `steps` it is the step. A checkpoint outside has the next one if its step's is taken.
    """

    progress: LoopProgress
    newest: int | None = None
    """The number of this run's newest checkpoint, begun or restored."""
    own: OwnSaves = field(default_factory=OwnSaves)
    ended_at: tuple[int, int | None] | None = None
    """Number and `newest` as restored from a checkpoint with which the function had ended."""
    has_begun: bool = False
    """Whether `steps` was called."""
    own_progress: OwnProgress | None = None
    """What user code said of its own loop; None once `steps` counts."""
    is_start_known: bool = False
    """Whether it is known where the training begins: its checkpoint was looked for, `steps` was
    called, or user code said its step."""
    restored_reports: Mapping[str, Reported] = field(default_factory=dict)
    """When each metric of this run's restored checkpoint was reported."""

    @property
    def step_done(self) -> int:
        """The last step that was made."""
        return self.progress.step if self.own_progress is None else self.own_progress.step

    @property
    def epoch_done(self) -> int:
        """The epoch of that step."""
        own = self.own_progress
        return self.progress.position.epoch if own is None else own.epoch

    @property
    def current(self) -> int:
        """The number of a checkpoint made now."""
        return self.progress.step + self.own.num_own_numbers

    @property
    def is_saved(self) -> bool:
        """Whether the newest checkpoint has this number."""
        return self.newest == self.current

    @property
    def moment(self) -> Moment:
        """Where the training is, for the decision whether a checkpoint is due."""
        return self.progress.moment(is_saved=self.is_saved)

    @property
    def is_at_end(self) -> bool:
        """Whether the training had ended, and nothing was added since."""
        return self.ended_at == (self.current, self.newest)

    @property
    def record_step(self) -> int:
        """The step of what is reported now.

        In a loop of the user's own it is what `ctx.progress` said, or the number of the next
        checkpoint, so that a resume takes back what was reported after its checkpoint, and nothing
        else.
        """
        if self.own_progress is not None:
            return self.own_progress.step
        if self.progress.step > 0 or self.progress.share is not None:
            return self.progress.step
        return self.reported_now.checkpoint

    @property
    def reported_now(self) -> Reported:
        """When a metric is reported that is reported now."""
        return Reported(self.current + self.is_saved, self.step_done)

    def stored(self) -> dict[str, Any]:
        """Return what a manifest holds as its position."""
        return {**self.progress.position._asdict(), **self.own._asdict()}

    def adopt(self, manifest: Manifest, *, is_ours: bool, had_ended: bool) -> None:
        """Continue from a checkpoint, of this run or of another one."""
        position = build(Position, manifest.position)
        if not is_ours:
            position = position._replace(stopped_early=False)
        self.own = build(OwnSaves, manifest.position)
        step = manifest.step - self.own.num_own_numbers
        self.progress.continue_from(step, manifest.epoch, position)
        self.newest = manifest.step if is_ours else None
        self.restored_reports = manifest.reports if is_ours else {}
        self.ended_at = (manifest.step, self.newest) if had_ended and is_ours else None

    def has_added_to(self, manifest: Manifest) -> bool:
        """Return whether `steps` has made a step since a checkpoint."""
        num_own = build(OwnSaves, manifest.position).num_own_numbers
        return self.progress.step > manifest.step - num_own

    def begin_steps(self) -> None:
        """Note that `steps` was called."""
        self.has_begun, self.is_start_known, self.own_progress = True, True, None

    def note_own_progress(self, step: int, total: int | None, epoch: int) -> None:
        """Take in how far a loop of the user's own is."""
        self.own_progress, self.is_start_known = OwnProgress(step, total, epoch), True

    def enter_call(self) -> None:
        """Leave the user's own loop for a call of `steps`, behind which the counts begin again.

        Also behind one that was left by a break, and continues on resume.
        """
        self.own = self.own.before_requests()._replace(in_own_loop=False)

    def reopen_call(self) -> None:
        """Continue the call of `steps` that had ended when the checkpoint was made."""
        self.own = self.own.before_requests()

    def begin_evaluation(self) -> None:
        """Count calls of `steps` from the first one: an evaluation's aren't the training's."""
        self.progress.position, self.own = Position(), OwnSaves()

    def count_request(self) -> None:
        """Count a request outside of `steps`, whether or not it makes a checkpoint."""
        own = self.own
        is_counted = own.num_requests_behind > 0 or own.num_saves_behind == 0
        if self.has_begun and is_counted:
            self.own = own._replace(num_requests_behind=own.num_requests_behind + 1)

    def count_passed(self, num_requests: int) -> None:
        """Count requests from a checkpoint on that had them passed, and didn't count them.

        From here on, not every save has a request that a resume would take for one.
        """
        if self.own.num_requests_behind == 0:
            self.own = self.own._replace(num_requests_behind=num_requests)

    def count_own_save(self) -> None:
        """Count a checkpoint outside of `steps`, perhaps after one of its calls."""
        if self.is_saved:
            self.take(self.current + 1)
        if self.has_begun:
            self.own = self.own._replace(num_saves_behind=self.own.num_saves_behind + 1)

    def enter_own_loop(self) -> None:
        """Note that the user's own loop makes the checkpoints."""
        self.own = self.own._replace(in_own_loop=True)

    def take(self, number: int) -> None:
        """Number the checkpoint of this step."""
        self.own = self.own._replace(num_own_numbers=number - self.progress.step)

    def begin_save(self) -> int:
        """Return the number of a checkpoint that begins now."""
        self.newest = self.current
        return self.newest
