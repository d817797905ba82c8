"""What a resumed training runs again: its code, from the top to the place of its checkpoint.

What stands after finished calls of `steps` may decide otherwise than it did: that is refused, or
warned of. No torch.
"""

import logging
from dataclasses import dataclass

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.training.numbers import CheckpointNumbers

logger = logging.getLogger(__name__)


@dataclass
class Replay:
    """How far the code that runs again has come: past which calls and checkpoints."""

    numbers: CheckpointNumbers
    trains: bool
    is_ours: bool | None = None
    """Whether the checkpoint to come to is of this run; None: there is none."""
    num_passed: int = 0
    """Calls of `steps` that were over before the checkpoint."""
    num_requests_passed: int = 0
    """Requests of a checkpoint after the checkpoint's own call."""
    num_counted_passed: int = 0
    """Those of them that count: without `num_requests_behind` only the forced ones."""
    has_arrived: bool = False
    """Whether the code has come to the checkpoint's place, or there was none to come to."""
    is_before_call: bool = False
    """Whether it is after a finished call of `steps`, and before that of the checkpoint."""

    @property
    def must_arrive(self) -> bool:
        """Whether there is a checkpoint of `steps` that the code hasn't come to yet."""
        is_there = self.has_arrived or self.numbers.own.in_own_loop
        return self.is_ours is not None and not is_there

    @property
    def is_under_way(self) -> bool:
        """Whether the checkpoint's own attempt has run this code already.

        Another run's checkpoint may also be the beginning of a loop without `steps`.
        """
        return self.must_arrive and (bool(self.is_ours) or self.num_passed > 0)

    def is_on_record(self, name: str) -> bool:
        """Tell whether what the code reports now under this name is on record already.

        All is that comes before the checkpoint's own call of `steps`, from the weights of that
        time. Behind that call only what the checkpoint has is for sure: the code may have passed
        the checkpoint's place without knowing it, if it doesn't request it again.
        """
        if not (self.trains and self.is_under_way):
            return False
        report = self.numbers.restored_reports.get(name)
        is_saved = report is not None and report.step == self.numbers.step_done
        return is_saved or not self._is_behind_call

    @property
    def _is_behind_call(self) -> bool:
        """Whether the code has passed the call of `steps` after which the checkpoint was made."""
        return self.num_passed > self.numbers.progress.position.loop

    @property
    def has_passed_any(self) -> bool:
        """Whether code ran that may have changed what was restored."""
        return bool(self.num_passed or self.num_requests_passed or self.has_arrived)

    def is_over(self, loop: int) -> bool:
        """Tell whether a call was over before the checkpoint that this training resumed from."""
        at = self.numbers.progress.position.loop
        return loop < at or (loop == at and self.numbers.own.num_saves_behind > 0)

    def pass_call(self, loop: int) -> None:
        """Pass a call that was over."""
        self.num_passed += 1
        self.is_before_call = self.trains and loop < self.numbers.progress.position.loop

    def pass_request(self, *, is_forced: bool) -> bool:
        """Pass a request of a checkpoint; return whether it is the one that was resumed from."""
        if not self._is_behind_call:
            return False
        self.num_requests_passed += 1
        if not (is_forced or self.numbers.own.num_requests_behind > 0):
            return False
        self.num_counted_passed += 1
        is_it = self.num_counted_passed == self._num_to_pass
        if is_it:
            self.num_counted_passed = self.num_requests_passed
            self.numbers.count_passed(self.num_requests_passed)
        return is_it

    @property
    def _num_to_pass(self) -> int:
        own = self.numbers.own
        return own.num_saves_behind and (own.num_requests_behind or own.num_saves_behind)

    def arrive(self) -> None:
        """Come to the place of the checkpoint."""
        self.has_arrived, self.is_before_call = True, False

    def end(self, num_calls: int) -> None:
        """End with the function, which returned after so many calls; see `refuse_to_end`."""
        if self.is_before_call:
            self.refuse_to_end(num_calls, "returned")
            self.is_before_call = False

    def refuse_to_end(self, num_calls: int, did: str) -> None:
        """Raise if the training ends before its checkpoint's call, unless it had ended before."""
        position = self.numbers.progress.position
        had_ended = self.numbers.is_at_end and self.numbers.newest is not None
        if not (position.stopped_early or had_ended):
            msg = (
                f"the training was resumed in call {position.loop + 1} of ctx.steps, and the "
                f"function {did} after {num_calls}: the code after finished calls ran again, and "
                "decided differently. Use one call with epochs=N and ctx.epoch_ended, or track "
                "the values that the decision depends on and skip finished calls"
            )
            raise InvalidParamsError(msg)

    def warn_of_missed_save(self) -> None:
        """Warn if the checkpoint was asked for after a call that is passed, and wasn't again."""
        loop = self.numbers.progress.position.loop
        is_met = not self._is_behind_call or self.num_counted_passed >= self._num_to_pass
        if is_met or self.numbers.is_at_end:
            return
        logger.warning(
            "the checkpoint was requested after call %d of ctx.steps, but not again on resume: "
            "changes of tracked objects by the code after that call are undone. Request the "
            "checkpoint unconditionally, or in the loop: "
            "ctx.checkpoint(force=ctx.epoch_ended)",
            loop + 1,
        )
