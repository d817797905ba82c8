"""The loop over optimizer steps: where it resumes, and what happens at a step's end."""

import logging
import math
import os
import signal
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.data.sampler import BatchShare, whole_number
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.events import NO_RANK, RankStopped, Stopped, StoppedBy
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.strategies.strategy import Strategy
from prefect_torch_ddp.rank.training.agreement import (
    POLL_S,
    Agreement,
    Outcome,
    Want,
    end_of,
    outside_after,
)
from prefect_torch_ddp.rank.training.progress import (
    TrainingState,
    refuse_to_end,
    warn_of_unwritten_save,
)
from prefect_torch_ddp.rank.training.reporter import Reporter
from prefect_torch_ddp.rank.training.same_data import refuse_different
from prefect_torch_ddp.rank.training.saves import Reason
from prefect_torch_ddp.rank.training.tracker import Tracker

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs the loops of one training, one after the other."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a rank that meet at a step's end
        self,
        config: RankConfig,
        info: RankInfo,
        state: TrainingState,
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
        here = info.rank, info.world_size, outside_after(state.step)
        self._stops = Agreement(*here)
        by_time = config.checkpoint.every_s is not None
        self._saves = Agreement(*here, ahead_s=2 * POLL_S) if by_time else None
        link.heartbeat.listen()
        self._state = state
        self._link = link
        self._reporter = reporter
        self._tracker = tracker
        self._gradients = gradients
        self._termination = Termination()
        self._num_loops = 0
        self._pass: weakref.ref[Generator[Any, None, None]] | None = None
        self._agreements = [self._stops, *([self._saves] if self._saves else [])]

    def run(self, loader: object, epochs: int) -> "Steps":
        """Check the arguments and return the loop."""
        if not isinstance(loader, RankLoader):
            takes = "ctx.steps takes a loader from ctx.loader(dataset, global_batch_size=...)"
            msg = f"{takes}, not a {type(loader).__name__}"
            raise InvalidParamsError(msg)
        is_endless = epochs == math.inf  # until the loop is left
        return Steps(self, loader, epochs if is_endless else whole_number("epochs", epochs, 0))

    def begin(self, loader: RankLoader, epochs: int) -> Iterator[Any]:
        """Return one pass of the loop, which `close` ends where somebody still holds it."""
        generator = self._run(loader, epochs)
        self._pass = weakref.ref(generator)
        return generator

    def _run(self, loader: RankLoader, epochs: int) -> Generator[Any, None, None]:
        state = self._state
        if state.share is not None:
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
        if self._is_over(loop) or state.stop_agreed:
            return
        self._tracker.resume()
        takes = loader.order, loader.global_batch_size, len(loader)
        state.position = state.position.entered(loop, *takes)
        if state.position.stopped_early:
            return
        refuse_different(self._stops, self._rank, loop, loader, epochs)
        num_epochs = epochs - state.position.loop_epoch
        left = num_epochs * len(loader) - state.position.batch
        state.total_steps = state.step + max(left, 0)
        state.total_epochs = state.position.epoch + max(num_epochs, 0)
        self._gradients.begin_loop(loader.batches)
        self._reporter.begin_loop(loader.batches)
        self._termination.install()
        try:
            with self._link.heartbeat.looping():
                if left <= 0 or self._begin(left):
                    while state.position.loop_epoch < epochs and not state.stop_agreed:
                        yield from self._epoch(loader)
                self._reporter.end_loop()
        finally:
            self._termination.remove()
            state.share = None
            self._gradients.leave_loop()
            for agreement in self._agreements:
                agreement.leave(outside_after(state.step))

    def close(self, *, failed: bool) -> None:
        """Let the others agree without this rank, unless it failed, which ends them all."""
        if not failed and self._pass is not None and (held := self._pass()) is not None:
            held.close()
        for agreement in self._agreements:
            agreement.close(failed=failed)
        if self._state.passes_by and not failed and not self._link.stop_requested():
            refuse_to_end(self._state, self._num_loops, "returned")
            self._state.passes_by = False

    def _is_over(self, loop: int) -> bool:
        """Tell whether a call was over before the checkpoint that this training resumed from."""
        state, position = self._state, self._state.position
        if state.passes_by and state.stop_wanted:
            refuse_to_end(state, loop, "asked to stop")
        if loop > position.loop or (loop == position.loop and not position.num_saves_behind):
            return False
        if not state.stop_agreed:
            logger.info(
                "call %d of ctx.steps was over before the checkpoint: the code behind it runs "
                "again, and what that changes in tracked objects is restored",
                loop + 1,
            )
            self._tracker.pass_by()
            state.passes_by = loop < position.loop and self._config.trains
        return True

    def _begin(self, num_steps: int) -> bool:
        """Pass the point before a loop; return whether there is to be a first step."""
        step = self._state.step
        points = outside_after(step), end_of(step + 1), end_of(step + num_steps)
        self._heed(self._stops.begin(*points, self._stop_wanted()))
        if self._saves is not None and not self._state.stop_agreed:
            self._saves.begin(*points, Want.NOTHING)
        return not self._state.stop_agreed

    def _epoch(self, loader: RankLoader) -> Iterator[Any]:
        state = self._state
        state.epoch = state.position.epoch + 1
        self._link.heartbeat.enter(Phase.LOADING)
        for batch, share in loader.lockstep(state.position.epoch, state.position.batch):
            self._begin_step(share)
            try:
                yield batch
            except GeneratorExit:  # the user left the loop: the step's record and place count
                self._reporter.end_step()
                warn_of_unwritten_save(state)
                state.leave_step(is_last=share.is_last)
                raise
            if self._end_step(share):
                return
            self._link.heartbeat.enter(Phase.LOADING)
        if state.position.batch:  # resumed after the last batch
            state.position = state.position.after_batch(is_last=True)

    def _begin_step(self, share: BatchShare) -> None:
        state = self._state
        state.step += 1
        state.share, state.epoch_ended = share, share.is_last
        self._gradients.begin_step(state.step, share)
        self._link.heartbeat.begin_step(state.step, state.epoch, is_last=share.is_last)

    def _end_step(self, share: BatchShare) -> bool:
        """Save and stop as agreed after the loop's body; return whether all ranks stop here."""
        state = self._state
        self._gradients.end_step(state.step)
        self._link.heartbeat.enter(Phase.STEP_END)
        here, is_last = end_of(state.step), state.step >= (state.total_steps or 0)
        then = outside_after(state.step) if is_last else end_of(state.step + 1)
        stop = self._stops.reach(here, then, self._stop_wanted())
        self._reporter.end_step()
        asked = Reason.REQUEST if state.save_wanted else None
        state.leave_step(is_last=share.is_last)
        self._heed(stop)
        asked = Reason.STOP if state.stop_agreed else asked
        if self._saves is not None and stop is None:
            is_time = self._tracker.due(asked, by_clock=True) is Reason.TIME
            save = self._saves.reach(here, then, Want.SAVE if is_time else Want.NOTHING)
            if save is not None and save.point == here:
                asked = asked or Reason.TIME
        self._tracker.save_if(self._tracker.due(asked))
        return state.stop_agreed

    def _heed(self, stop: Outcome | None) -> None:
        """Obey an agreement to stop; report one that the training itself didn't request."""
        if stop is None:
            return
        state = self._state
        is_early = Want.STOP_EARLY in stop.want
        state.stop_agreed = True
        state.position = state.position._replace(stopped_early=is_early)
        logger.info("all ranks stop after step %d", state.step)
        if not is_early:
            state.stopped_by = self._stopped_by()
            self._link.send(RankStopped(NO_RANK, Stopped(state.step, state.stopped_by)))

    def _stopped_by(self) -> StoppedBy:
        if self._link.stop_requested():
            return "order"
        return "SIGTERM" if self._termination.requested else "peer"

    def _stop_wanted(self) -> Want:
        want = Want.STOP_EARLY if self._state.stop_wanted else Want.NOTHING
        if self._link.stop_requested() or self._termination.requested:
            want |= Want.STOP
        return want


@dataclass(frozen=True)
class Steps(Iterable[Any]):
    """What `ctx.steps` returns: the `for` loop over it alone holds the pass, so a break ends it.

    Code behind the break could otherwise not be told from the step's own, while a variable holds
    the iterator.
    """

    loop: StepLoop
    loader: RankLoader
    epochs: int

    def __iter__(self) -> Iterator[Any]:
        """Begin a call of `steps`."""
        return self.loop.begin(self.loader, self.epochs)


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
