"""Trainings on record that have finished: the same one isn't run again."""

from prefect.logging import get_run_logger
from pydantic_core import from_json

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import finished_key
from prefect_torch_ddp.checkpoint.manifest import find_manifest
from prefect_torch_ddp.errors import CheckpointError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.results import CheckpointRef, TrainingSummary
from prefect_torch_ddp.storage.formats import DAMAGE, FINISHED, build_model, location
from prefect_torch_ddp.storage.protocol import Storage


def write_finished(storage: Storage, run_id: str, summary: TrainingSummary) -> None:
    """Put a finished training on record; failing that, warn: the training itself is kept.

    Raises:
        SupersededError: a newer attempt has begun.
    """
    try:
        refuse_superseded(storage, run_id, summary.attempt)
        values = from_json(summary.model_dump_json())
        storage.write(finished_key(run_id), FINISHED.to_bytes(values))
    except StorageError as error:
        words = "the end of the training could not be recorded: %s"
        get_run_logger().warning(words, error)


def finished_training(storage: Storage, run_id: str) -> TrainingSummary | None:
    """Return what is on record of a run's training that has finished, if its results are complete.

    Raises:
        NewerFormatError: it is of a newer format.
        StorageError: the storage failed.
    """
    key = finished_key(run_id)
    try:
        values = FINISHED.from_bytes(storage.read(key), location(storage, key))
        summary, _ = build_model(TrainingSummary, values)
        _check_left(storage, run_id, summary.last_checkpoint)
    except ObjectNotFoundError:
        return None
    except (CheckpointError, *DAMAGE) as error:
        words = "the record of a finished training isn't valid, so the training runs again: %s"
        get_run_logger().warning(words, error)
        return None
    return summary


def _check_left(storage: Storage, run_id: str, last: CheckpointRef | None) -> None:
    # Its last checkpoint may be gone, or superseded: a newer attempt resumed from one before it.
    if last is None:
        return
    newest = find_manifest(storage, run_id, last.step)
    if newest.attempt != last.attempt:
        counts = f"the checkpoint of step {last.step} that counts is that of attempt"
        msg = f"{counts} {newest.attempt}, not of attempt {last.attempt}"
        raise CheckpointError(msg)
