"""What is refused or warned of where code and checkpoints don't fit.

Code behind finished calls of `steps` runs again on resume, and may decide otherwise.
"""

import logging

from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.saving.state import TrainingState

logger = logging.getLogger(__name__)


def refuse_to_end(state: TrainingState, num_calls: int, did: str) -> None:
    """Raise if the training ends before its checkpoint's call, unless it had ended before."""
    position, had_ended = state.position, state.is_at_end and state.saved is not None
    if not (position.stopped_early or had_ended):
        msg = (
            f"the training was resumed in call {position.loop + 1} of ctx.steps, and the "
            f"function {did} after {num_calls}: the code behind finished calls runs again, and "
            "decided otherwise. Use one call with epochs=N and ctx.epoch_ended, or track what the "
            "decision depends on and pass over finished calls"
        )
        raise InvalidParamsError(msg)


def warn_of_missed_save(state: TrainingState, num_calls: int, num_saves: int) -> None:
    """Warn if the checkpoint was asked for behind a call that is passed, and wasn't again."""
    position = state.position
    is_met = num_calls <= position.loop or num_saves >= position.num_saves_behind
    if is_met or state.is_at_end:
        return
    logger.warning(
        "the checkpoint was asked for behind call %d of ctx.steps, and on resume it was not asked "
        "for again: what the code behind that call changed in tracked objects afterwards is "
        "undone; ask for it unconditionally, or in the loop: ctx.checkpoint(force=ctx.epoch_ended)",
        position.loop + 1,
    )


def warn_of_unwritten_save(state: TrainingState) -> None:
    """Warn, where a loop is left within a step, if that step asked for a checkpoint."""
    if state.save_wanted:
        logger.warning(
            "the checkpoint that was asked for in step %d has not been written: its loop was left "
            "before the step's end. Ask for it behind the loop, whose iterator no variable may "
            "hold: write enumerate(ctx.steps(...)) in the for line",
            state.step,
        )
