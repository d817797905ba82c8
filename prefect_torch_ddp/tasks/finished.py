"""Owns the record of a finished training in its storage, by which a task run recognises it that has no result of Prefect's."""

import json

from prefect.logging import get_run_logger
from pydantic import ValidationError

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import finished_key
from prefect_torch_ddp.checkpoint.manifest import find_manifest
from prefect_torch_ddp.errors import CheckpointError, ObjectNotFoundError, StorageError
from prefect_torch_ddp.results import TrainingReport
from prefect_torch_ddp.tasks.run import Run


def record_finished(run: Run, report: TrainingReport) -> None:
    """Put a finished training on record; trouble with that costs a warning, since the training itself is kept.

    Raises:
        SupersededError: a newer attempt has begun.
    """
    try:
        refuse_superseded(run.storage, run.run_id, report.attempt)
        run.storage.write(finished_key(run.run_id), report.model_dump_json(indent=1).encode())
    except StorageError as error:
        get_run_logger().warning("that the training has finished could not be put on record: %s", error)


def finished_training(run: Run) -> TrainingReport | None:
    """Return the report of the run's training where it has finished and what it left is still there; None otherwise.

    Raises:
        StorageError: the storage failed.
    """
    logger = get_run_logger()
    try:
        report = TrainingReport.model_validate(json.loads(run.storage.read(finished_key(run.run_id))))
        _check_left(run, report)
    except ObjectNotFoundError:
        return None
    except (ValidationError, ValueError, CheckpointError) as error:
        logger.warning("the record of a finished training doesn't count, it is run again: %s", error)
        return None
    logger.info("the training has finished already, in attempt %d: it is not run again", report.attempt)
    return report


def _check_left(run: Run, report: TrainingReport) -> None:
    """Raise CheckpointError where the training's last checkpoint is gone, or void: a newer attempt went on from one before it."""
    last = report.last_checkpoint
    if last is not None and (newest := find_manifest(run.storage, run.run_id, last.step)).attempt != last.attempt:
        msg = f"the checkpoint of step {last.step} that counts is that of attempt {newest.attempt}, not of attempt {last.attempt}"
        raise CheckpointError(msg)
