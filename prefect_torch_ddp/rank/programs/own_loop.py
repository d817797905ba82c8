"""`ctx.due`: what all ranks agree to do at the end of a step of a loop that isn't `ctx.steps`."""

import math
from functools import partial
from typing import NamedTuple

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.training.loop_progress import LoopProgress, Moment
from prefect_torch_ddp.rank.training.saver import Saver
from prefect_torch_ddp.rank.training.saves import Reason
from prefect_torch_ddp.rank.training.step_end import StepEnd


class Due(NamedTuple):
    """What all ranks are to do after a step; the same on each of them."""

    save: bool
    """Whether to make a checkpoint now, by `ctx.commit`; before a stop it is True, unless this step
    has one already."""
    stop: bool
    """Whether to leave the loop after that."""


class OwnLoop:
    """A loop of the user's own, whose steps all ranks make in the same order."""

    def __init__(self, end: StepEnd, saver: Saver, progress: LoopProgress, first_step: int) -> None:
        """Begin the loop, before the end of its first step on this rank.

        Args:
            end: the ranks' agreements, which begin after the step before the first one.
            saver: knows when a checkpoint is due.
            progress: knows whether all ranks have stopped.
            first_step: the one that ends now.
        """
        self._end, self._saver, self._progress = end, saver, progress
        self.step = first_step - 1
        end.enter()
        saver.begin_interval()
        self._stop = end.begin(self.step, math.inf)

    def due(self, moment: Moment) -> Due:
        """Return what all ranks do at the end of a step; see `RankContext.due`."""
        step = moment.step
        # The ranks agree on a step that comes soon, and over a gap that one would never come.
        if step != self.step + 1:
            msg = (
                f"ctx.due was given step {step} after step {self.step}: call it once in every step"
            )
            raise InvalidParamsError(msg)
        self.step = step
        end = self._end
        if self._progress.has_stopped:
            return Due(save=False, stop=True)
        stop = self._stop or end.stop(step)
        reason = partial(self._saver.due, moment=moment)
        if stop is not None:
            end.heed(stop, step)
            return Due(save=reason(Reason.STOP) is not None, stop=True)
        asked = end.save(step, end.take_request(), partial(reason, by_clock=True))
        return Due(save=reason(asked) is not None, stop=False)

    def close(self, *, failed: bool) -> None:
        """Let the others agree without this rank, unless it failed, which ends them all."""
        self._end.leave(self.step)
        self._end.close(failed=failed)
