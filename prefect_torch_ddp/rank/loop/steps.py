"""Owns the loop over optimizer steps: where it goes on, what happens at a step's end, and how
all ranks agree on both.

Owns what SIGTERM means to a rank in its loop: that the training is to stop, as on a machine
that is to be given back.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.data.sampler import BatchShare
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.events import Stopped
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.checkpointing import Tracker
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.gradients.micro_batches import refuse_half_done
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.loop.agreement import (
    POLL_S,
    Agreement,
    Outcome,
    Want,
    end_of,
    outside_after,
)
from prefect_torch_ddp.rank.loop.state import Place, Position, TrainingState
from prefect_torch_ddp.rank.reporter import Reporter

logger = logging.getLogger(__name__)


class StepLoop:
    """Runs the loops of one training, one after the other."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a rank that meet at a step's end
        self,
        config: RankConfig,
        place: Place,
        state: TrainingState,
        link: Link,
        reporter: Reporter,
        tracker: Tracker,
    ) -> None:
        """Make it; the agreements are made by the first loop."""
        self._config = config
        self._place = place
        self._state = state
        self._link = link
        self._reporter = reporter
        self._tracker = tracker
        self._stops: Agreement | None = None
        self._saves: Agreement | None = None
        self._termination = Termination()
        self._num_loops = 0

    def run(self, loader: object, epochs: int) -> Iterator[Any]:
        """Check the arguments and return the loop.

        Raises:
            InvalidParamsError: an argument can't work, or another loop is under way.
        """
        if not isinstance(loader, RankLoader):
            msg = f"ctx.steps takes a loader from ctx.loader(dataset, global_batch_size=...), not a {type(loader).__name__}"
            raise InvalidParamsError(msg)
        if epochs < 0:
            msg = f"epochs is {epochs}; it can't be negative"
            raise InvalidParamsError(msg)
        return self._run(loader, epochs)

    def _run(self, loader: RankLoader, epochs: int) -> Iterator[Any]:
        state = self._state
        if state.share is not None:
            msg = "ctx.steps inside of ctx.steps: end the outer loop first"
            raise InvalidParamsError(msg)
        loop = self._num_loops
        self._num_loops += 1
        if loop == 0:
            self._make_agreements()
            self._tracker.begin()
        enters = self._enter(loop, loader)
        before = state.position
        self._tracker.pass_by(
            is_over=loop < before.loop, is_next=loop == before.loop and before.is_behind
        )
        if not enters or state.position.stopped_early:
            return
        self._tracker.set_generators()
        first = state.position
        left = max((epochs - first.loop_epoch) * len(loader) - first.batch, 0)
        state.total_steps = state.step + left
        self._reporter.begin_loop(loader.batches)
        self._termination.install()
        try:
            with self._link.heartbeat.looping():
                if left == 0 or self._begin(left):
                    while state.position.loop_epoch < epochs and not state.stop_agreed:
                        yield from self._epoch(loader)
                self._reporter.end_loop()
        finally:
            self._termination.remove()
            state.share = None
            self._leave_agreements()

    def close(self, *, failed: bool) -> None:
        """Let the others agree without this rank, unless it failed, which ends them all."""
        for agreement in (self._stops, self._saves):
            if agreement is not None:
                agreement.close(failed=failed)

    def _make_agreements(self) -> None:
        place, here = self._place, outside_after(self._state.step)
        # Two, so that a stop that all ranks ask for in one step comes after that very step,
        # whatever else is being agreed on.
        self._stops = Agreement(place.rank, place.world_size, here)
        if self._config.checkpoint.every_s is not None:
            self._saves = Agreement(place.rank, place.world_size, here, ahead_s=2 * POLL_S)
        self._link.listens()

    def _leave_agreements(self) -> None:
        for agreement in (self._stops, self._saves):
            if agreement is not None:
                agreement.leave(outside_after(self._state.step))

    def _begin(self, num_steps: int) -> bool:
        """Pass the point before a loop; return whether there is to be a first step."""
        step = self._state.step
        points = (outside_after(step), end_of(step + 1), end_of(step + num_steps))
        assert self._stops is not None
        self._heed(self._stops.begin(*points, self._stop_wanted()))
        if self._saves is not None and not self._state.stop_agreed:
            self._saves.begin(*points, Want.NOTHING)
        return not self._state.stop_agreed

    def _enter(self, loop: int, loader: RankLoader) -> bool:
        """Find the place in a loop that begins or goes on; return whether there is anything to
        do in it.
        """
        state = self._state
        position = state.position
        if loop < position.loop or (
            loop == position.loop and position.is_behind
        ):  # a resumed training has left it behind
            logger.warning(
                "call %d of ctx.steps was over before the checkpoint and adds no step, but the code behind it runs again; one "
                "ctx.steps(..., epochs=n) with ctx.epoch_ended in its body is resumed where it was",
                loop + 1,
            )
            return False
        if state.stop_agreed:
            return False
        order, size = loader.order, loader.global_batch_size
        if loop > position.loop:
            # An epoch that was left half-way isn't taken up again: the next loop begins the
            # next order.
            epoch = position.epoch + (position.batch > 0)
            position = replace(
                position, loop=loop, loop_epoch=0, epoch=epoch, batch=0, is_behind=False
            )
        elif position.batch and position.order not in ("", order):
            logger.warning(
                "the checkpoint is from the midst of an epoch of %s, and the loader's are of %s: that epoch can't be finished, "
                "the next one begins",
                position.order,
                order,
            )
            position = _after(position, is_last=True)
        elif position.batch and position.global_batch_size != size:
            done = position.batch * position.global_batch_size
            position = replace(position, batch=min(done // size, len(loader)))
            if done % size:
                logger.warning(
                    "global_batch_size changed within an epoch: %d samples of it are seen twice",
                    done % size,
                )
        state.position = replace(position, global_batch_size=size, order=order)
        return True

    def _epoch(self, loader: RankLoader) -> Iterator[Any]:
        state = self._state
        state.epoch = state.position.epoch + 1
        self._link.heartbeat.enter(Phase.LOADING)
        for batch, share in loader.lockstep(state.position.epoch, state.position.batch):
            self._begin_step(share)
            try:
                yield batch
            except GeneratorExit:
                self._leave(share)
                raise
            if self._end_step(share):
                return
            self._link.heartbeat.enter(Phase.LOADING)
        if state.position.batch:  # resumed behind the last batch
            state.position = _after(state.position, is_last=True)

    def _begin_step(self, share: BatchShare) -> None:
        state = self._state
        state.step += 1
        state.share = share
        state.epoch_ended = share.is_last
        state.owes_gradients = False
        if state.virtual is not None:
            state.virtual.begin_step(state.step)
        self._link.heartbeat.begin_step(state.step, state.epoch, is_last=share.is_last)

    def _end_step(self, share: BatchShare) -> bool:
        """Do what is due after the loop's body; return whether all ranks stop here."""
        state = self._state
        refuse_half_done(state)
        self._link.heartbeat.enter(Phase.STEP_END)
        assert self._stops is not None
        here = end_of(state.step)
        then = (
            end_of(state.step + 1)
            if state.step < (state.total_steps or 0)
            else outside_after(state.step)
        )
        stop = self._stops.reach(here, then, self._stop_wanted())
        by_time = False
        if self._saves is not None and stop is None:
            save = self._saves.reach(
                here, then, Want.SAVE if self._tracker.is_due_by_time() else Want.NOTHING
            )
            by_time = save is not None and save.point == here
        self._reporter.end_step()
        state.share = None
        state.position = _after(state.position, is_last=share.is_last)
        self._heed(stop)
        self._tracker.save_if(forced=state.save_wanted or state.stop_agreed, by_time=by_time)
        state.save_wanted = False
        return state.stop_agreed

    def _heed(self, stop: Outcome | None) -> None:
        """Take an agreement to stop over into the state, and tell the supervisor of one that
        isn't the training's own.
        """
        if stop is None:
            return
        state = self._state
        state.stop_agreed = True
        state.position = replace(state.position, stopped_early=Want.STOP_EARLY in stop.want)
        logger.info("all ranks stop after step %d", state.step)
        if Want.STOP_EARLY not in stop.want:
            state.stopped_by = (
                "order"
                if self._link.stop_requested()
                else "SIGTERM"
                if self._termination.requested
                else "peer"
            )
            self._link.send_stopped(Stopped(state.step, state.stopped_by))

    def _leave(self, share: BatchShare) -> None:
        """End the step in whose body the user left the loop: its record and its place count."""
        self._reporter.end_step()
        self._state.share = None
        self._state.position = _after(self._state.position, is_last=share.is_last)

    def _stop_wanted(self) -> Want:
        want = Want.STOP_EARLY if self._state.stop_wanted else Want.NOTHING
        if self._link.stop_requested() or self._termination.requested:
            want |= Want.STOP
        return want


def _after(position: Position, *, is_last: bool) -> Position:
    """Return the position after a batch."""
    if is_last:
        return replace(
            position, loop_epoch=position.loop_epoch + 1, epoch=position.epoch + 1, batch=0
        )
    return replace(position, batch=position.batch + 1)


class Termination:
    """Notes SIGTERM while it is in force; where the user has a handler of his own it never
    is.
    """

    def __init__(self) -> None:
        """Start without a note."""
        self.requested = False
        self._pid = os.getpid()
        self._installed = False

    def install(self) -> None:
        """Take SIGTERM over, in the main thread and from the default action only."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._installed and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._installed = True

    def remove(self) -> None:
        """Give the default action back."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._installed = False

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.requested = True
            return
        # A child that the rank forked, such as a worker of its DataLoader, which is ended by
        # this signal.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
