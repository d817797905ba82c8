"""`ctx.due`: what all ranks agree to do at the end of a step of a loop that isn't `ctx.steps`."""

import logging
from typing import NamedTuple

from prefect_torch_ddp.data.sampler import whole_number
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.events import NO_RANK, RankStopped, Stopped, StoppedBy
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.training.agreement import (
    NEVER,
    POLL_S,
    Agreement,
    Outcome,
    Want,
    end_of,
    outside_after,
)
from prefect_torch_ddp.rank.training.loop_progress import LoopProgress, Requests
from prefect_torch_ddp.rank.training.saver import Saver
from prefect_torch_ddp.rank.training.steps import Termination

logger = logging.getLogger(__name__)


class Due(NamedTuple):
    """What all ranks are to do after a step; the same on each of them."""

    save: bool
    """Whether to make a checkpoint now, by `ctx.commit`; always before a stop."""
    stop: bool
    """Whether to leave the loop after that."""


class OwnLoop:
    """A loop of the user's own, whose steps all ranks make in the same order."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a rank that meet at a step's end
        self,
        config: RankConfig,
        info: RankInfo,
        requests: Requests,
        progress: LoopProgress,
        link: Link,
        saver: Saver,
        first_step: int,
    ) -> None:
        """Take part in the ranks' agreements from the end of this step on.

        Raises:
            RuntimeError: there are several ranks and the process group isn't up.
        """
        self._policy = config.checkpoint
        self._requests, self._progress, self._link, self._saver = requests, progress, link, saver
        self._termination = Termination()
        before = outside_after(first_step - 1)
        self._stops = Agreement(info.rank, info.world_size, before)
        by_time = self._policy.every_s is not None
        ahead_s = 2 * POLL_S
        saves = Agreement(info.rank, info.world_size, before, ahead_s=ahead_s) if by_time else None
        self._saves = saves
        link.heartbeat.listen()
        self._termination.install()
        saver.begin_interval()
        self.step = first_step - 1
        points = before, end_of(first_step), NEVER - 1
        self._pending = self._stops.begin(*points, Want.NOTHING)
        if self._saves is not None:
            self._saves.begin(*points, Want.NOTHING)

    def due(self, step: int, *, ends_epoch: int | None) -> Due:
        """See `RankContext.due`."""
        if step <= self.step:
            msg = f"ctx.due was given step {step} after step {self.step}: call it once a step"
            raise InvalidParamsError(msg)
        self.step = step
        if self._progress.has_stopped:
            return Due(save=False, stop=True)
        here, then = end_of(step), end_of(step + 1)
        stop = self._pending or self._stops.reach(here, then, self._stop_wanted())
        if stop is not None:
            self._heed(stop)
            return Due(save=self._saver.is_open, stop=True)
        saves = self._requests.take_save()
        policy = self._policy
        saves |= policy.every_steps is not None and step % policy.every_steps == 0
        if policy.every_epochs is not None and ends_epoch is not None:
            saves |= ends_epoch % policy.every_epochs == 0
        if self._saves is not None:
            is_time = not saves and self._saver.is_time()
            agreed = self._saves.reach(here, then, Want.SAVE if is_time else Want.NOTHING)
            saves |= agreed is not None and agreed.point == here
        return Due(save=saves and self._saver.is_open, stop=False)

    def close(self, *, failed: bool) -> None:
        """Let the others agree without this rank, unless it failed, which ends them all."""
        self._termination.remove()
        for agreement in (self._stops, self._saves):
            if agreement is not None:
                agreement.leave(outside_after(self.step))
                agreement.close(failed=failed)

    def _heed(self, stop: Outcome) -> None:
        """Obey an agreement to stop; report one that the training itself didn't request."""
        stopped_by = None if Want.STOP_EARLY in stop.want else self._stopped_by()
        self._progress.stop(stopped_by or "training")
        logger.info("all ranks stop after step %d", self.step)
        if stopped_by is not None:
            self._link.send(RankStopped(NO_RANK, Stopped(self.step, stopped_by)))

    def _stopped_by(self) -> StoppedBy:
        if self._link.stop_requested():
            return "order"
        return "SIGTERM" if self._termination.requested else "peer"

    def _stop_wanted(self) -> Want:
        want = Want.STOP_EARLY if self._requests.wants_stop else Want.NOTHING
        if self._link.stop_requested() or self._termination.requested:
            want |= Want.STOP
        return want


def checked_step(step: object) -> int:
    """Return the number of a step that ended; InvalidParamsError: it is none, from 1."""
    return whole_number("step", step, 1)
