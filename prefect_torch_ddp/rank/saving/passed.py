"""Code behind finished calls of `steps` that runs again on resume, and decides otherwise."""

import logging
from contextlib import suppress

from prefect_torch_ddp.checkpoint.keys import ended_key
from prefect_torch_ddp.errors import InvalidParamsError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.saving.state import Position, TrainingState

logger = logging.getLogger(__name__)


def refuse_to_end(config: RankConfig, state: TrainingState, num_calls: int, did: str) -> None:
    """Raise if the training ends before its checkpoint's call, unless it had ended before."""
    with suppress(ObjectNotFoundError):
        if config.storage.read(ended_key(config.run_id)) == str(state.saved).encode():
            return
    if not state.position.stopped_early:
        msg = (
            f"the training was resumed in call {state.position.loop + 1} of ctx.steps, and the "
            f"function {did} after {num_calls}: the code behind finished calls runs again, and "
            "decided otherwise. Use one call with epochs=N and ctx.epoch_ended, or track what the "
            "decision depends on and pass over finished calls"
        )
        raise InvalidParamsError(msg)


def record_end(config: RankConfig, state: TrainingState) -> None:
    """Put on record which checkpoint is the last, for a training that is run again."""
    if state.position.loop and state.stopped_by is None and not state.passes_by:
        with suppress(StorageError):  # all that was trained is there
            config.storage.write(ended_key(config.run_id), str(state.saved).encode())


def warn_of_missed_save(position: Position, num_calls: int, num_saves: int) -> None:
    """Warn if the checkpoint was asked for behind a call that is passed, and wasn't again."""
    if num_calls <= position.loop or num_saves >= position.num_saves_behind:
        return
    logger.warning(
        "the checkpoint was asked for behind call %d of ctx.steps, and on resume it was not asked "
        "for again: what the code behind that call changed in tracked objects afterwards is "
        "undone; ask for it unconditionally, or in the loop: ctx.checkpoint(force=ctx.epoch_ended)",
        position.loop + 1,
    )
