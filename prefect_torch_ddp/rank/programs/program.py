"""A program that has its own loop, its own checkpoints, or both: what `RankContext` gives it."""

import logging
import time
from functools import cached_property

from prefect_torch_ddp.data.sampler import whole_number
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.programs.checkpoint_folder import CheckpointFolder
from prefect_torch_ddp.rank.programs.own_loop import Due, OwnLoop
from prefect_torch_ddp.rank.training.loop_progress import Moment, Requests
from prefect_torch_ddp.rank.training.numbers import CheckpointNumbers
from prefect_torch_ddp.rank.training.saver import Saver
from prefect_torch_ddp.rank.training.step_end import StepEnd
from prefect_torch_ddp.rank.training.training_state import TrainingState

logger = logging.getLogger(__name__)


class Program:
    """The folder and the loop of a program, each made when it is first asked for."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a rank that meet in a program
        self,
        config: RankConfig,
        info: RankInfo,
        requests: Requests,
        numbers: CheckpointNumbers,
        link: Link,
        saver: Saver,
        state: TrainingState,
    ) -> None:
        """Make neither yet."""
        self._config, self._info, self._link = config, info, link
        self._requests, self._numbers = requests, numbers
        self._saver, self._state = saver, state
        self._loop: OwnLoop | None = None
        self._has_epochs = False

    @cached_property
    def folder(self) -> CheckpointFolder:
        """The folder of its checkpoints."""
        return CheckpointFolder(self._state, self._saver, self._link.heartbeat)

    @property
    def saves_folders(self) -> bool:
        """Whether it writes its own checkpoints."""
        return "folder" in vars(self)

    @property
    def step(self) -> int | None:
        """The last step that `due` was given; None: it wasn't called."""
        return None if self._loop is None else self._loop.step

    def due(self, step: object, ends_epoch: object) -> Due:
        """See `RankContext.due`."""
        number = whole_number("step", step, 1)
        epoch = None if ends_epoch is None else whole_number("ends_epoch", ends_epoch, 1)
        if self._loop is None:
            here = self._config, self._info, self._requests, self._numbers.progress, self._link
            end = StepEnd(*here, number - 1)
            self._loop = OwnLoop(end, self._saver, self._numbers.progress, number)
        self._has_epochs |= epoch is not None
        # Only the checkpoints of folders are numbered by the steps that user code counts.
        is_saved = self._saver.holds_folders and self._numbers.newest == number
        due = self._loop.due(Moment(number, epoch, is_saved))
        if due.save and due.stop:
            self._state.expect_save()
        if due.save and self.saves_folders:
            self.folder.due_since_s = time.monotonic()
        return due

    def close_loop(self, *, failed: bool) -> None:
        """Take no further part in the ranks' agreements."""
        if self._loop is None:
            return
        self._loop.close(failed=failed)
        every = self._config.checkpoint.every_epochs
        is_whole = not failed and self._numbers.progress.stopped_by is None
        if every and is_whole and not self._has_epochs and self._info.rank == 0:
            logger.warning(
                "checkpoint.every_epochs=%d made no checkpoint: no call of ctx.due had "
                "ends_epoch=..., the number of the epoch that ended",
                every,
            )

    def close(self) -> None:
        """Remove the local folder."""
        if self.saves_folders:
            self.folder.close()
