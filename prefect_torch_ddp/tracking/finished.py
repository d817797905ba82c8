"""Trainings on record that have finished: the same one isn't run again."""

import math
from contextlib import suppress
from typing import Any, TypeVar

from prefect.logging import get_run_logger
from pydantic_core import from_json, to_json

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import finished_key
from prefect_torch_ddp.checkpoint.manifest import find_manifest
from prefect_torch_ddp.errors import (
    CheckpointError,
    ObjectNotFoundError,
    StorageError,
    SupersededError,
)
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.results import CheckpointRef, Result, TrainingSummary
from prefect_torch_ddp.storage.formats import DAMAGE, FINISHED, build_model, location
from prefect_torch_ddp.storage.protocol import Storage

MAX_VALUE_BYTES = 1_000_000
"""Of a value that is kept, as JSON."""


class EndedCall(Result):
    """What a call of a `ddp_task` with a `run_key` leaves once its training has ended."""

    attempt: int
    num_steps: int
    code: str
    """Digest of the function's code: another one may go on, as with more epochs."""
    value: Any
    """What rank 0 returned: plain JSON."""
    last_checkpoint: CheckpointRef | None


Finished = TypeVar("Finished", TrainingSummary, EndedCall)


def record_finished(storage: Storage, run_id: str, report: TrainingSummary | EndedCall) -> None:
    """Put a finished training on record; failing that, warn: the training itself is kept.

    Raises:
        SupersededError: a newer attempt has begun.
    """
    try:
        refuse_superseded(storage, run_id, report.attempt)
        values = from_json(report.model_dump_json())
        storage.write(finished_key(run_id), FINISHED.to_bytes(values))
    except StorageError as error:
        words = "that the training has finished could not be put on record: %s"
        get_run_logger().warning(words, error)


def finished_training(storage: Storage, run_id: str, kind: type[Finished]) -> Finished | None:
    """Return what is on record of a run's training that has finished, if its results are complete.

    Raises:
        NewerFormatError: it is of a newer format.
        StorageError: the storage failed.
    """
    key = finished_key(run_id)
    try:
        values = FINISHED.from_bytes(storage.read(key), location(storage, key))
        report, _ = build_model(kind, values)
        _check_left(storage, run_id, report.last_checkpoint)
    except ObjectNotFoundError:
        return None
    except (CheckpointError, *DAMAGE) as error:
        words = "the record of a finished training doesn't count, it is run again: %s"
        get_run_logger().warning(words, error)
        return None
    return report


def ended_call(storage: Storage, run_id: str, code: str) -> EndedCall | None:
    """Return what an equal call of the same code left, if its training has ended."""
    done = finished_training(storage, run_id, EndedCall)
    if done is None or done.code != code:
        return None
    words = "the training had ended at step %d: its value is returned, nothing was trained"
    get_run_logger().info(words, done.num_steps)
    return done


def record_ended_call(
    storage: Storage, record: RunRecord, num_steps: int, code: str, value: Any
) -> None:
    """Keep a call's value, for the next call like it: its training has ended."""
    if not _is_plain_json(value):
        words = "the value (%s) isn't kept: it is no plain JSON, or too long; an equal call runs"
        get_run_logger().info(f"{words} the function again", type(value).__qualname__)
        return
    attempt, last = record.attempts[-1].attempt, record.checkpoint
    done = EndedCall(
        attempt=attempt, num_steps=num_steps, code=code, value=value, last_checkpoint=last
    )
    with suppress(SupersededError):  # the same call goes on elsewhere, and keeps its own
        record_finished(storage, record.run_id, done)


def _is_plain_json(value: Any) -> bool:
    """Whether a value is the same, types included, after a way through JSON."""

    def is_plain(each: Any) -> bool:
        if type(each) is dict:
            return all(type(name) is str for name in each) and all(map(is_plain, each.values()))
        if type(each) is list:
            return all(map(is_plain, each))
        is_finite = type(each) is not float or math.isfinite(each)
        return each is None or (type(each) in (bool, int, float, str) and is_finite)

    try:
        data = to_json([value])  # as deep as it will lie there
        return is_plain(value) and len(data) <= MAX_VALUE_BYTES and from_json(data) == [value]
    except (ValueError, RecursionError):  # half a surrogate pair; a list in itself
        return False


def _check_left(storage: Storage, run_id: str, last: CheckpointRef | None) -> None:
    # Its last checkpoint may be gone, or superseded: a newer attempt resumed from one before it.
    if last is None:
        return
    newest = find_manifest(storage, run_id, last.step)
    if newest.attempt != last.attempt:
        counts = f"the checkpoint of step {last.step} that counts is that of attempt"
        msg = f"{counts} {newest.attempt}, not of attempt {last.attempt}"
        raise CheckpointError(msg)
