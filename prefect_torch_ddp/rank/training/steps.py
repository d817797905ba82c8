"""The loop over optimizer steps: where it resumes, and what happens at a step's end."""

import logging
import weakref
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect_torch_ddp.data.sampler import BatchShare
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.link import Link
from prefect_torch_ddp.rank.strategies.strategy import Strategy
from prefect_torch_ddp.rank.training.calls.plans import Plan, plan_for
from prefect_torch_ddp.rank.training.calls.same_data import (
    meaning_in,
    refuse_different,
    refuse_other_meaning,
    refuse_other_order,
)
from prefect_torch_ddp.rank.training.loop_progress import Requests
from prefect_torch_ddp.rank.training.replay import Replay
from prefect_torch_ddp.rank.training.reporting.reporter import Reporter
from prefect_torch_ddp.rank.training.saves import Reason
from prefect_torch_ddp.rank.training.step_end import StepEnd
from prefect_torch_ddp.rank.training.training_state import TrainingState

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
        state: TrainingState,
        gradients: Strategy,
    ) -> None:
        """Take part in the ranks' agreements from now on; see `StepEnd` for what it raises."""
        self._config, self._rank = config, info.rank
        self._progress = progress = replay.numbers.progress
        self._end = StepEnd(config, info, requests, progress, link, progress.step)
        self._requests = requests
        self._replay = replay
        self._link = link
        self._reporter = reporter
        self._state = state
        self._gradients = gradients
        self._num_loops = 0
        self._pass: weakref.ref[Generator[Any, None, None]] | None = None

    def run(
        self, loader: object, epochs: object, total: object, *, begins_anew: bool = False
    ) -> "Steps":
        """Check the arguments and return the loop."""
        follow = partial(self._state.follow, begins_anew=begins_anew)
        return Steps(self, plan_for(self._config, loader, epochs, total, follow))

    def begin(self, plan: Plan) -> Iterator[Any]:
        """Return one pass of the loop, which `close` ends if somebody still holds it."""
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
            self._state.begin()
            self._warn_of_no_epochs(plan)
        refuse_other_meaning(progress.position, loop, plan)
        if self._is_over(loop, plan) or progress.has_stopped:
            return
        self._state.enter_call()
        plan.enter(progress, loop)
        progress.note_meaning(meaning_in(plan))
        if progress.position.stopped_early:
            return
        refuse_different(self._end.stops, self._rank, loop, plan)
        left = plan.begin(progress)
        self._gradients.begin_loop(plan.batches)
        self._reporter.begin_loop(plan.batches)
        self._end.enter()
        try:
            with self._link.heartbeat.looping():
                if left <= 0 or self._begin(left):
                    yield from self._steps(plan, loop)
                if not progress.has_stopped:
                    progress.end_call()
                self._reporter.end_loop()
        finally:
            self._end.leave(progress.step)
            progress.leave_loop()
            self._gradients.leave_loop()

    def close(self, *, failed: bool) -> None:
        """Let the others agree without this rank, unless it failed, which ends them all."""
        if not failed and self._pass is not None and (held := self._pass()) is not None:
            held.close()
        self._end.close(failed=failed)
        if not failed and not self._link.stop_requested():
            self._replay.end(self._num_loops)

    def _warn_of_no_epochs(self, plan: Plan) -> None:
        """Warn of an interval of epochs if the first call, for most the only one, has none."""
        every, trains = self._config.checkpoint.every_epochs, self._config.trains
        if plan.batches is None and every is not None and trains and self._rank == 0:
            logger.warning(
                "checkpoint.every_epochs=%d makes no checkpoint here: a call of ctx.steps without "
                "a loader from ctx.loader has no epochs; use checkpoint.every_steps",
                every,
            )

    def _is_over(self, loop: int, plan: Plan) -> bool:
        """Pass a call that was over before the checkpoint; return whether it was.

        One that had made all of its steps continues if it is asked for more now.
        """
        replay, at = self._replay, self._progress.position
        if replay.is_before_call and self._requests.wants_stop:
            replay.refuse_to_end(loop, "asked to stop")
        if not replay.is_over(loop):
            return False
        if loop == at.loop and at.is_whole and plan.has_more(at):
            replay.numbers.reopen_call()
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
        if stop := self._end.begin(step, num_steps):
            self._end.heed(stop, step)
        return not self._progress.has_stopped

    def _steps(self, plan: Plan, loop: int) -> Iterator[Any]:
        self._link.heartbeat.enter(Phase.LOADING)
        compare = partial(refuse_other_order, self._end.stops, self._rank, loop)
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
        step, is_last = progress.step, progress.step >= (progress.total_steps or 0)
        stop = self._end.stop(step, is_last=is_last)
        self._reporter.end_step()
        asked = self._end.take_request()
        progress.leave_step(share)
        if stop is not None:
            self._end.heed(stop, step)
            asked = Reason.STOP
        else:
            by_clock = partial(self._state.due, by_clock=True)
            asked = self._end.save(step, asked, by_clock, is_last=is_last)
        self._state.save_if(self._state.due(asked))
        return progress.has_stopped

    def _leave_within_step(self, share: BatchShare) -> None:
        """Leave the loop in a step's body; warn if that step asked for a checkpoint."""
        if self._requests.take_save():
            logger.warning(
                "the checkpoint that was asked for in step %d has not been written: its loop was "
                "left before the step's end. Request it after the loop. No variable may hold the "
                "loop's iterator: write enumerate(ctx.steps(...)) in the for line",
                self._progress.step,
            )
        self._progress.leave_step(share)


@dataclass(frozen=True)
class Steps(Iterable[Any]):
    """What `ctx.steps` returns: only the `for` loop over it holds the pass, so a break ends it.

    Code after the break could otherwise not be told from the step's own, while a variable holds
    the iterator.
    """

    loop: StepLoop
    plan: Plan

    def __iter__(self) -> Iterator[Any]:
        """Begin a call of `steps`."""
        return self.loop.begin(self.plan)
