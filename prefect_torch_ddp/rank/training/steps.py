"""The loop over optimizer steps: where it resumes, and what happens at a step's end."""

import logging
import math
import os
import signal
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from prefect_torch_ddp.data.sampler import BatchShare
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.events import NO_RANK, RankStopped, Stopped, StoppedBy
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.strategies.strategy import Strategy
from prefect_torch_ddp.rank.training.agreement import (
    NEVER,
    POLL_S,
    Agreement,
    Outcome,
    Want,
    end_of,
    outside_after,
)
from prefect_torch_ddp.rank.training.calls.plans import Plan, plan_for
from prefect_torch_ddp.rank.training.calls.same_data import refuse_different, refuse_other_order
from prefect_torch_ddp.rank.training.loop_progress import Requests
from prefect_torch_ddp.rank.training.replay import Replay
from prefect_torch_ddp.rank.training.reporting.reporter import Reporter
from prefect_torch_ddp.rank.training.saves import Reason
from prefect_torch_ddp.rank.training.tracker import Tracker

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs the loops of one training, one after the other."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a rank that meet at a step's end
        self,
        config: RankConfig,
        info: RankInfo,
        requests: Requests,
        replay: Replay,
        link: Link,
        reporter: Reporter,
        tracker: Tracker,
        gradients: Strategy,
    ) -> None:
        """Take part in the ranks' agreements from now on.

        There are two, so that a stop that all ranks ask for in one step comes after that very
        step, whatever else is being agreed on.
        """
        self._config, self._rank = config, info.rank
        self._progress = replay.numbers.progress
        here = info.rank, info.world_size, outside_after(self._progress.step)
        self._stops = Agreement(*here)
        by_time = config.checkpoint.every_s is not None
        self._saves = Agreement(*here, ahead_s=2 * POLL_S) if by_time else None
        link.heartbeat.listen()
        self._requests = requests
        self._replay = replay
        self._link = link
        self._reporter = reporter
        self._tracker = tracker
        self._gradients = gradients
        self._termination = Termination()
        self._num_loops = 0
        self._pass: weakref.ref[Generator[Any, None, None]] | None = None
        self._agreements = [self._stops, *([self._saves] if self._saves else [])]

    def run(
        self, loader: object, epochs: object, total: object, *, begins_anew: bool = False
    ) -> "Steps":
        """Check the arguments and return the loop."""
        follow = partial(self._tracker.follow, begins_anew=begins_anew)
        return Steps(self, plan_for(self._config, loader, epochs, total, follow))

    def begin(self, plan: Plan) -> Iterator[Any]:
        """Return one pass of the loop, which `close` ends where somebody still holds it."""
        generator = self._run(plan)
        self._pass = weakref.ref(generator)
        return generator

    def _run(self, plan: Plan) -> Generator[Any, None, None]:
        progress = self._progress
        if progress.share is not None:
            msg = (
                "ctx.steps inside of ctx.steps: end the outer loop, and hold no iterator of it. To "
                "train on two datasets in each step, as by zip, make one loader of both: of "
                "torch.utils.data.StackDataset(first, second), or of a dataset that combines them"
            )
            raise InvalidParamsError(msg)
        loop = self._num_loops
        self._num_loops += 1
        if loop == 0:
            self._tracker.begin()
        if self._is_over(loop) or progress.has_stopped:
            return
        self._tracker.enter_call(loop)
        plan.enter(progress, loop)
        if progress.position.stopped_early:
            return
        refuse_different(self._stops, self._rank, loop, plan)
        left = plan.begin(progress)
        self._gradients.begin_loop(plan.batches)
        self._reporter.begin_loop(plan.batches)
        self._termination.install()
        try:
            with self._link.heartbeat.looping():
                if left <= 0 or self._begin(left):
                    yield from self._steps(plan, loop)
                self._reporter.end_loop()
        finally:
            self._termination.remove()
            progress.leave_loop()
            self._gradients.leave_loop()
            for agreement in self._agreements:
                agreement.leave(outside_after(progress.step))

    def close(self, *, failed: bool) -> None:
        """Let the others agree without this rank, unless it failed, which ends them all."""
        if not failed and self._pass is not None and (held := self._pass()) is not None:
            held.close()
        for agreement in self._agreements:
            agreement.close(failed=failed)
        if not failed and not self._link.stop_requested():
            self._replay.end(self._num_loops)

    def _is_over(self, loop: int) -> bool:
        """Pass a call that was over before the checkpoint; return whether it was."""
        replay = self._replay
        if replay.is_before_call and self._requests.wants_stop:
            replay.refuse_to_end(loop, "asked to stop")
        if not replay.is_over(loop):
            return False
        if not self._progress.has_stopped:
            logger.info(
                "call %d of ctx.steps was over before the checkpoint: the code after it runs "
                "again, and what that changes in tracked objects is restored",
                loop + 1,
            )
            replay.pass_call(loop)
        return True

    def _begin(self, num_steps: float) -> bool:
        """Pass the point before a loop; return whether there is to be a first step."""
        step = self._progress.step
        last = NEVER if num_steps == math.inf else step + int(num_steps)
        points = outside_after(step), end_of(step + 1), end_of(last)
        self._heed(self._stops.begin(*points, self._stop_wanted()))
        if self._saves is not None and not self._progress.has_stopped:
            self._saves.begin(*points, Want.NOTHING)
        return not self._progress.has_stopped

    def _steps(self, plan: Plan, loop: int) -> Iterator[Any]:
        self._link.heartbeat.enter(Phase.LOADING)
        compare = partial(refuse_other_order, self._stops, self._rank, loop)
        for batch, share in plan.walk(self._progress, compare):
            self._begin_step(share)
            try:
                yield batch
            except GeneratorExit:  # the user left the loop: the step's record and position count
                self._reporter.end_step()
                self._leave_within_step(share)
                raise
            if self._end_step(share):
                return
            self._link.heartbeat.enter(Phase.LOADING)

    def _begin_step(self, share: BatchShare) -> None:
        progress = self._progress
        progress.begin_step(share)
        self._gradients.begin_step(progress.step, share if share.has_data else None)
        self._link.heartbeat.begin_step(progress.step, progress.epoch, is_last=share.is_last)

    def _end_step(self, share: BatchShare) -> bool:
        """Save and stop as agreed after the loop's body; return whether all ranks stop here."""
        progress = self._progress
        self._gradients.end_step(progress.step)
        self._link.heartbeat.enter(Phase.STEP_END)
        here, is_last = end_of(progress.step), progress.step >= (progress.total_steps or 0)
        then = outside_after(progress.step) if is_last else end_of(progress.step + 1)
        stop = self._stops.reach(here, then, self._stop_wanted())
        self._reporter.end_step()
        asked = Reason.REQUEST if self._requests.take_save() else None
        progress.leave_step(share)
        self._heed(stop)
        asked = Reason.STOP if progress.has_stopped else asked
        if self._saves is not None and stop is None:
            is_time = self._tracker.due(asked, by_clock=True) is Reason.TIME
            save = self._saves.reach(here, then, Want.SAVE if is_time else Want.NOTHING)
            if save is not None and save.point == here:
                asked = asked or Reason.TIME
        self._tracker.save_if(self._tracker.due(asked))
        return progress.has_stopped

    def _leave_within_step(self, share: BatchShare) -> None:
        """Leave the loop in a step's body; warn if that step asked for a checkpoint."""
        if self._requests.take_save():
            logger.warning(
                "the checkpoint that was asked for in step %d has not been written: its loop was "
                "left before the step's end. Ask for it after the loop, whose iterator no "
                "variable may hold: write enumerate(ctx.steps(...)) in the for line",
                self._progress.step,
            )
        self._progress.leave_step(share)

    def _heed(self, stop: Outcome | None) -> None:
        """Obey an agreement to stop; report one that the training itself didn't request."""
        if stop is None:
            return
        is_early = Want.STOP_EARLY in stop.want
        step, stopped_by = self._progress.step, None if is_early else self._stopped_by()
        self._progress.stop(stopped_by or "training")
        logger.info("all ranks stop after step %d", step)
        if stopped_by is not None:
            self._link.send(RankStopped(NO_RANK, Stopped(step, stopped_by)))

    def _stopped_by(self) -> StoppedBy:
        if self._link.stop_requested():
            return "order"
        return "SIGTERM" if self._termination.requested else "peer"

    def _stop_wanted(self) -> Want:
        want = Want.STOP_EARLY if self._requests.wants_stop else Want.NOTHING
        if self._link.stop_requested() or self._termination.requested:
            want |= Want.STOP
        return want


@dataclass(frozen=True)
class Steps(Iterable[Any]):
    """What `ctx.steps` returns: the `for` loop over it alone holds the pass, so a break ends it.

    Code after the break could otherwise not be told from the step's own, while a variable holds
    the iterator.
    """

    loop: StepLoop
    plan: Plan

    def __iter__(self) -> Iterator[Any]:
        """Begin a call of `steps`."""
        return self.loop.begin(self.plan)


class Termination:
    """SIGTERM during a loop, as on a preempted machine; never where the user handles it himself."""

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
