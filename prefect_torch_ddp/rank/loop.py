"""Owns the loop over optimizer steps: where it goes on, what happens at a step's end, and how all ranks agree on both."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.data.sampler import BatchShare
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.pulse import Phase
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.link import ControlLink
from prefect_torch_ddp.rank.reporter import Reporter
from prefect_torch_ddp.rank.state import Place, Position, TrainingState
from prefect_torch_ddp.rank.tracker import Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Votes:
    """What a rank wants, or all of them together."""

    stop: bool
    """The supervisor asked for it: a cancel or a preemption."""
    stop_early: bool
    """The training asked for it."""
    save: bool
    """A checkpoint is due by time."""


class Ballot:
    """Has all ranks agree on each step's end, at next to no cost: asked at its start, answered at its end."""

    def __init__(self, world_size: int) -> None:
        """Make a group of its own, so that votes don't queue behind gradients; every rank has to."""
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._counts = torch.zeros(3, dtype=torch.int32, device="cpu")
        self._work: dist.Work | None = None

    def open(self, votes: Votes) -> None:
        """Cast this rank's votes; doesn't wait."""
        if self._group is not None:
            self._counts = torch.tensor([votes.stop, votes.stop_early, votes.save], dtype=torch.int32, device="cpu")
            self._work = dist.all_reduce(self._counts, group=self._group, async_op=True)

    def close(self, votes: Votes) -> Votes:
        """Return what any rank wanted when it opened; alone, what this one wants by now."""
        if self._work is None:
            return votes
        self._work.wait()
        self._work = None
        return Votes(*(count > 0 for count in self._counts.tolist()))


class StepLoop:
    """Runs the loops of one training, one after the other."""

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a rank that meet at a step's end
        self, config: RankConfig, place: Place, state: TrainingState, link: ControlLink, reporter: Reporter, tracker: Tracker
    ) -> None:
        """Make it; the ballot's group is made by the first loop."""
        self._config = config
        self._world_size = place.world_size
        self._state = state
        self._link = link
        self._reporter = reporter
        self._tracker = tracker
        self._ballot: Ballot | None = None
        self._num_loops = 0

    def run(self, loader: object, epochs: int) -> Iterator[Any]:
        """Check the arguments and return the loop.

        Raises:
            InvalidParamsError: an argument can't work, or another loop is under way.
        """
        if not isinstance(loader, RankLoader):
            msg = f"rank.steps takes a loader from rank.loader(dataset, global_batch_size=...), not a {type(loader).__name__}"
            raise InvalidParamsError(msg)
        if epochs < 0:
            msg = f"epochs is {epochs}; it can't be negative"
            raise InvalidParamsError(msg)
        return self._run(loader, epochs)

    def _run(self, loader: RankLoader, epochs: int) -> Iterator[Any]:
        state = self._state
        if state.share is not None:
            msg = "rank.steps inside of rank.steps: end the outer loop first"
            raise InvalidParamsError(msg)
        loop = self._num_loops
        self._num_loops += 1
        if loop == 0:
            self._ballot = Ballot(self._world_size)
            self._tracker.begin()
        if not self._enter(loop, loader) or state.position.stopped_early:
            return
        first = state.position
        left = (epochs - first.loop_epoch) * len(loader) - first.batch
        state.total_steps = state.step + max(left, 0)
        try:
            with self._link.pulse.looping():
                while state.position.loop_epoch < epochs and not state.stop_agreed:
                    yield from self._epoch(loader)
        finally:
            state.share = None

    def _enter(self, loop: int, loader: RankLoader) -> bool:
        """Find the place in a loop that begins or goes on; return whether there is anything to do in it."""
        state = self._state
        position = state.position
        if loop < position.loop or state.stop_agreed:
            return False  # a resumed training has left this loop behind
        size = loader.global_batch_size
        if loop > position.loop:
            # An epoch that was left half-way isn't taken up again: the next loop begins the next order.
            position = replace(position, loop=loop, loop_epoch=0, epoch=position.epoch + (position.batch > 0), batch=0)
        elif position.batch and position.global_batch_size != size:
            done = position.batch * position.global_batch_size
            position = replace(position, batch=min(done // size, len(loader)))
            if done % size:
                logger.warning("global_batch_size changed within an epoch: %d samples of it are seen twice", done % size)
        state.position = replace(position, global_batch_size=size)
        return True

    def _epoch(self, loader: RankLoader) -> Iterator[Any]:
        state = self._state
        state.epoch = state.position.epoch + 1
        self._link.pulse.enter(Phase.LOADING)
        for batch, share in loader.lockstep(state.position.epoch, state.position.batch):
            self._begin_step(share)
            try:
                yield batch
            except GeneratorExit:
                self._leave(share)
                raise
            if self._end_step(share):
                return
            self._link.pulse.enter(Phase.LOADING)
        if state.position.batch:  # resumed behind the last batch
            state.position = _after(state.position, is_last=True)

    def _begin_step(self, share: BatchShare) -> None:
        state = self._state
        assert self._ballot is not None
        self._ballot.open(self._votes())
        state.step += 1
        state.share = share
        state.epoch_ended = share.is_last
        self._link.pulse.begin_step(state.step, state.epoch, is_last=share.is_last)

    def _end_step(self, share: BatchShare) -> bool:
        """Do what is due after the loop's body; return whether all ranks stop here."""
        state = self._state
        assert self._ballot is not None
        self._link.pulse.enter(Phase.STEP_END)
        agreed = self._ballot.close(self._votes())
        self._reporter.end_step()
        state.share = None
        state.stop_agreed = agreed.stop or agreed.stop_early
        state.position = replace(_after(state.position, is_last=share.is_last), stopped_early=agreed.stop_early)
        self._tracker.save_if(forced=state.save_wanted or state.stop_agreed, by_time=agreed.save)
        state.save_wanted = False
        if state.stop_agreed:
            logger.info("all ranks stop after step %d", state.step)
        return state.stop_agreed

    def _leave(self, share: BatchShare) -> None:
        """End the step in whose body the user left the loop: its record and its place count, nobody votes."""
        self._reporter.end_step()
        self._state.share = None
        self._state.position = _after(self._state.position, is_last=share.is_last)

    def _votes(self) -> Votes:
        return Votes(self._link.stop_requested(), self._state.stop_wanted, self._tracker.is_due_by_time())


def _after(position: Position, *, is_last: bool) -> Position:
    """Return the position after a batch."""
    if is_last:
        return replace(position, loop_epoch=position.loop_epoch + 1, epoch=position.epoch + 1, batch=0)
    return replace(position, batch=position.batch + 1)
