"""What all ranks agree on at the end of a step: whether to stop, or to save because it is time."""

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from prefect_torch_ddp.protocol.events import StoppedBy
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
from prefect_torch_ddp.rank.training.saves import Reason

logger = logging.getLogger(__name__)


class StepEnd:
    """The ranks' agreements of one training, for `ctx.steps` and for loops of the user's own."""

    def __init__(  # noqa: PLR0913, PLR0917 - what can ask for a stop or a save
        self,
        config: RankConfig,
        info: RankInfo,
        requests: Requests,
        progress: LoopProgress,
        link: Link,
        step: int,
    ) -> None:
        """Take part in the ranks' agreements from now on, outside of a loop after this step.

        There are two agreements, so that a stop that all ranks ask for in one step comes after
        that very step, whatever else is being agreed on.

        Raises:
            RuntimeError: there are several ranks and the process group isn't up.
        """
        here = info.rank, info.world_size, outside_after(step)
        self.stops = Agreement(*here)
        by_time = config.checkpoint.every_s is not None
        self._saves = Agreement(*here, ahead_s=2 * POLL_S) if by_time else None
        self._requests, self._progress, self._link = requests, progress, link
        self._termination = Termination()
        link.heartbeat.listen()

    def enter(self) -> None:
        """Have a SIGTERM stop the loop that begins."""
        self._termination.install()

    def begin(self, step: int, num_steps: float) -> Outcome | None:
        """Pass the point before a loop that follows this step; return an agreement to stop.

        Args:
            step: the one before the loop.
            num_steps: of the loop; `math.inf`: as many as come.
        """
        last = end_of(step + int(num_steps)) if num_steps < NEVER else NEVER - 1
        points = outside_after(step), end_of(step + 1), last
        stop = self.stops.begin(*points, self._stop_wanted())
        if self._saves is not None and stop is None:
            self._saves.begin(*points, Want.NOTHING)
        return stop

    def stop(self, step: int, *, is_last: bool = False) -> Outcome | None:
        """Pass the end of a step; return an agreement to stop here."""
        return self.stops.reach(*_points(step, is_last=is_last), self._stop_wanted())

    def heed(self, stop: Outcome, step: int) -> None:
        """Obey an agreement to stop; report one that the training itself didn't request."""
        stopped_by = None if Want.STOP_EARLY in stop.want else self._stopped_by()
        self._progress.stop(stopped_by or "training")
        logger.info("all ranks stop after step %d", step)
        if stopped_by is not None:
            self._link.say_stopped(step, stopped_by)

    def take_request(self) -> Reason | None:
        """Return and forget that the step asked for a checkpoint, as it did on every rank."""
        return Reason.REQUEST if self._requests.take_save() else None

    def save(
        self,
        step: int,
        asked: Reason | None,
        due_by_clock: Callable[[Reason | None], Reason | None],
        *,
        is_last: bool = False,
    ) -> Reason | None:
        """Pass the end of a step that doesn't stop; return what asks for a checkpoint here.

        Args:
            step: the one that ends.
            asked: by the training, on every rank.
            due_by_clock: returns why a checkpoint is due, also by this rank's clock.
            is_last: of its loop.
        """
        if self._saves is None:
            return asked
        is_time = due_by_clock(asked) is Reason.TIME
        here, then = _points(step, is_last=is_last)
        save = self._saves.reach(here, then, Want.SAVE if is_time else Want.NOTHING)
        return asked or (Reason.TIME if save is not None and save.point == here else None)

    def leave(self, step: int) -> None:
        """Be outside of a loop after this step: the others agree without this rank."""
        self._termination.remove()
        for agreement in self._agreements:
            agreement.leave(outside_after(step))

    def close(self, *, failed: bool) -> None:
        """Take no further part."""
        for agreement in self._agreements:
            agreement.close(failed=failed)

    @property
    def _agreements(self) -> list[Agreement]:
        return [self.stops] if self._saves is None else [self.stops, self._saves]

    def _stop_wanted(self) -> Want:
        want = Want.STOP_EARLY if self._requests.wants_stop else Want.NOTHING
        if self._link.stop_requested() or self._termination.requested:
            want |= Want.STOP
        return want

    def _stopped_by(self) -> StoppedBy:
        if self._link.stop_requested():
            return "order"
        return "SIGTERM" if self._termination.requested else "peer"


def _points(step: int, *, is_last: bool) -> tuple[int, int]:
    """Return the point at a step's end, and the one that comes next."""
    return end_of(step), outside_after(step) if is_last else end_of(step + 1)


class Termination:
    """SIGTERM during a loop, as on a preempted machine; never if the user handles it himself."""

    def __init__(self) -> None:
        """Start without a note."""
        self.requested = self._installed = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Take SIGTERM over, in the main thread and from the default action only."""
        is_main = threading.current_thread() is threading.main_thread()
        self._installed = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._installed:
            signal.signal(signal.SIGTERM, self._note)

    def remove(self) -> None:
        """Give the default action back."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.requested = True
            return
        # A child that the rank forked, such as a DataLoader worker, which this signal is to end.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
