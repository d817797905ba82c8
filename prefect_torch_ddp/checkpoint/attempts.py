"""Owns the claim on a run's next attempt, which fences older ones off.

Owns the record of where each attempt of a run went on, which voids what an older one commits
beyond that, however late.

Owns small JSON records that carry their own digest, so that no flipped bit in one goes
unnoticed.
"""

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from prefect_torch_ddp.checkpoint.keys import attempt_key, attempts_prefix, resume_key
from prefect_torch_ddp.errors import DamagedObjectError, ObjectNotFoundError, SupersededError
from prefect_torch_ddp.storage.protocol import Storage


def claim_attempt(storage: Storage, run_id: str) -> int:
    """Claim a run's next attempt, from 1; exactly one caller gets each, and older attempts
    can't commit checkpoints any more.
    """
    attempt = newest_attempt(storage, run_id) + 1
    while not _claim(storage, run_id, attempt):
        attempt += 1
    return attempt


def claim_attempt_after(storage: Storage, run_id: str, own_attempt: int) -> int:
    """Claim the attempt that follows one's own.

    Raises:
        SupersededError: somebody else has it: the training goes on there, and this caller must
            not fence that off.
    """
    if not _claim(storage, run_id, own_attempt + 1):
        msg = (
            f"attempt {own_attempt} of run {run_id} has been superseded by attempt {newest_attempt(storage, run_id)}: "
            "it is not started again here"
        )
        raise SupersededError(msg)
    return own_attempt + 1


def _claim(storage: Storage, run_id: str, attempt: int) -> bool:
    claim = json.dumps(
        {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    ).encode()
    return storage.write_if_absent(attempt_key(run_id, attempt), claim)


def newest_attempt(storage: Storage, run_id: str) -> int:
    """Return the newest attempt that was claimed; 0 where none was."""
    prefix = attempts_prefix(run_id)
    numbers = (found.key.removeprefix(prefix) for found in storage.list(prefix))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def refuse_superseded(storage: Storage, run_id: str, attempt: int) -> None:
    """Raise SupersededError where a newer attempt has been claimed."""
    newest = newest_attempt(storage, run_id)
    if newest > attempt:
        msg = f"attempt {attempt} of run {run_id} has been superseded by attempt {newest}: it ends here"
        raise SupersededError(msg)


logger = logging.getLogger(__name__)

FROM_NOTHING = -1
"""The step of an attempt that found no checkpoint."""


def record_resume(storage: Storage, run_id: str, attempt: int, step: int, of_attempt: int) -> None:
    """Put on record behind which checkpoint an attempt goes on, before it makes its first step.

    A process that is held up between its look for newer attempts and its commit may commit
    hours later. Its checkpoint is no part of the run's history then: the newer attempt made
    those steps itself.

    Args:
        storage: where the run is.
        run_id: the run.
        attempt: the attempt that begins.
        step: the checkpoint's.
        of_attempt: who made it; 0 where it is another run's, or there is none.

    Raises:
        StorageError: it can't be written.
    """
    storage.write(
        resume_key(run_id, attempt), to_checksummed_json({"step": step, "of_attempt": of_attempt})
    )


def superseded_test(storage: Storage, run_id: str) -> Callable[[int, int], bool]:
    """Return the test whether a checkpoint, by step and attempt, is void: a newer attempt
    resumed from one before it.
    """
    prefix = attempts_prefix(run_id)
    keys = [found.key for found in storage.list(prefix)]
    numbers = {
        key: number
        for key in keys
        if (number := key.removeprefix(prefix).removesuffix(".json")).isdecimal()
    }
    read = {
        int(number): _resume_record(storage, key)
        for key, number in numbers.items()
        if key.endswith(".json")
    }
    resume_records = _in_force(
        {attempt: begun for attempt, begun in read.items() if begun is not None}
    )

    def is_superseded(step: int, attempt: int) -> bool:
        return any(
            attempt < newer and (step, attempt) > begun for newer, begun in resume_records.items()
        )

    return is_superseded


def _in_force(resume_records: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Leave out what attempts put on record too late: after a newer one had gone on from a
    checkpoint that it would have voided.

    Such an attempt was held up between its choice and the record. It has been superseded and
    commits nothing, and the newer one's checkpoint counts.
    """
    in_force: dict[int, tuple[int, int]] = {}
    for attempt in sorted(resume_records, reverse=True):
        begun = resume_records[attempt]
        if not any(newer[1] < attempt and newer > begun for newer in in_force.values()):
            in_force[attempt] = begun
    return in_force


def _resume_record(storage: Storage, key: str) -> tuple[int, int] | None:
    """Return the checkpoint that an attempt began with; of another run's it doesn't count how
    far that run was.
    """
    try:
        values = from_checksummed_json(storage.read(key))
        return (
            (int(values["step"]), int(values["of_attempt"]))
            if values["of_attempt"]
            else (FROM_NOTHING, 0)
        )
    except ObjectNotFoundError:
        return None
    except (DamagedObjectError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("%s is damaged and left out: %r", key, error)
        return None


def to_checksummed_json(values: Mapping[str, Any]) -> bytes:
    """Return the values as JSON, with the sha256 of what they are."""
    return json.dumps({**values, "sha256": _digest(values)}, indent=1, allow_nan=False).encode()


def from_checksummed_json(data: bytes) -> dict[str, Any]:
    """Return the values; raises ValueError, TypeError, KeyError or AttributeError where they
    aren't what was sealed.
    """
    values: dict[str, Any] = json.loads(data)
    if values.pop("sha256") != _digest(values):
        msg = "its content isn't that of its sha256"
        raise ValueError(msg)
    return values


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, allow_nan=False).encode()).hexdigest()
