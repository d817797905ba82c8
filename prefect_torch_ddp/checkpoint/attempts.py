"""Attempts of a run: the claim that fences older ones off, where each resumed, how it failed."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from prefect_torch_ddp.checkpoint.keys import (
    FROM_NOTHING,
    CheckpointId,
    attempt_key,
    attempts_prefix,
    ended_key,
    resume_key,
)
from prefect_torch_ddp.errors import (
    DamagedObjectError,
    ObjectNotFoundError,
    StorageError,
    SupersededError,
)
from prefect_torch_ddp.protocol.events import FailureRecord
from prefect_torch_ddp.storage.formats import (
    CLAIM,
    DAMAGE,
    ENDED,
    FAILURE,
    RESUME,
    build,
    location,
)
from prefect_torch_ddp.storage.protocol import Storage

LOOK_S = 30.0
"""For how long other hosts look for what one wrote: a network's folder may show it late."""
_FAILURES = "runs/{}/failures/"

logger = logging.getLogger(__name__)


def claim_attempt(storage: Storage, run_id: str) -> int:
    """Claim a run's next attempt, from 1; older attempts can't commit checkpoints any more.

    Of several callers at once, each gets another number.
    """
    attempt = newest_attempt(storage, run_id) + 1
    while not _claim(storage, run_id, attempt):
        attempt += 1
    return attempt


def claim_attempt_after(storage: Storage, run_id: str, own_attempt: int) -> int:
    """Claim the attempt that follows one's own.

    Raises:
        SupersededError: somebody else has it; the training continues there, so this caller
            must not fence it off.
    """
    if not _claim(storage, run_id, own_attempt + 1):
        newest = newest_attempt(storage, run_id)
        raise _superseded(run_id, own_attempt, newest, "it is not started again here")
    return own_attempt + 1


def _claim(storage: Storage, run_id: str, attempt: int) -> bool:
    claim = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    return storage.write_if_absent(attempt_key(run_id, attempt), CLAIM.to_bytes(claim))


def claim_times(storage: Storage, run_id: str) -> dict[int, float]:
    """Return when each attempt was claimed, in Unix seconds; damaged claims are left out.

    Raises:
        NewerFormatError: a claim is of a newer format.
        StorageError: the storage can't be read.
    """
    prefix, times = attempts_prefix(run_id), {}
    for key in [found.key for found in storage.list(prefix)]:
        if (number := key.removeprefix(prefix)).isdecimal():
            with suppress(*DAMAGE):
                claim = CLAIM.from_bytes(storage.read(key), location(storage, key))
                times[int(number)] = float(claim["time"])
    return times


def newest_attempt(storage: Storage, run_id: str) -> int:
    """Return the newest attempt that was claimed; 0 if none was."""
    prefix = attempts_prefix(run_id)
    numbers = (found.key.removeprefix(prefix) for found in storage.list(prefix))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def refuse_superseded(storage: Storage, run_id: str, attempt: int) -> None:
    """Raise SupersededError if a newer attempt has been claimed."""
    newest = newest_attempt(storage, run_id)
    if newest > attempt:
        raise _superseded(run_id, attempt, newest, "it ends here")


def refuse_unseen(storage: Storage, run_id: str, attempt: int) -> None:
    """Raise StorageError if this host doesn't find the claim of its attempt, which was written.

    Its storage is another one, and so lacks the run's checkpoints too: a training there would
    start from scratch. Call it before anything is written.
    """
    key, ends_at = attempt_key(run_id, attempt), time.monotonic() + LOOK_S
    while True:
        try:
            storage.read(key)
        except DamagedObjectError:  # it is there
            return
        except ObjectNotFoundError as error:
            if time.monotonic() > ends_at:
                msg = (
                    f"host {socket.gethostname()} doesn't find {location(storage, key)}, which was "
                    f"written before attempt {attempt} began: its folder isn't mounted there, or "
                    "is another one; mount it before the Dask worker starts"
                )
                raise StorageError(msg) from error
        else:
            return
        threading.Event().wait(LOOK_S / 30)


def _superseded(run_id: str, attempt: int, newest: int, outcome: str) -> SupersededError:
    msg = f"attempt {attempt} of run {run_id} has been superseded by attempt {newest}: {outcome}"
    return SupersededError(msg)


def write_resume(storage: Storage, run_id: str, attempt: int, begun: CheckpointId) -> None:
    """Record which checkpoint an attempt resumes from, before its first step.

    A process that hangs between its check for newer attempts and its commit may commit hours
    later. The record excludes that checkpoint from the run's history: the newer attempt made
    those steps itself. The attempt of `begun` is 0 for another run's, and for none.
    """
    record = {"step": begun.step, "of_attempt": begun.attempt}
    storage.write(resume_key(run_id, attempt), RESUME.to_bytes(record))


def write_end(storage: Storage, run_id: str, last: CheckpointId) -> None:
    """Record, before it is committed, which checkpoint holds what the function left at its end.

    If it isn't committed after all, the record names nothing that is resumed from.
    """
    storage.write(ended_key(run_id), ENDED.to_bytes(last._asdict()))


def had_ended(storage: Storage, run_id: str, checkpoint: CheckpointId) -> bool:
    """Tell whether the training's function had ended with this checkpoint.

    A damaged record is left out, with a warning: the function runs again from the checkpoint.

    Raises:
        NewerFormatError: the record of the end is of a newer format.
        StorageError: the storage can't be read.
    """
    key = ended_key(run_id)
    try:
        record = ENDED.from_bytes(storage.read(key), location(storage, key))
        return CheckpointId(record["step"], record["attempt"]) == checkpoint
    except ObjectNotFoundError:
        return False
    except DAMAGE as error:
        logger.warning("%s is damaged and left out: %r", key, error)
        return False


def superseded_test(storage: Storage, run_id: str) -> Callable[[CheckpointId], bool]:
    """Return the test whether a checkpoint is superseded.

    It is where a newer attempt resumed from an earlier checkpoint. A record doesn't count that
    was written after a newer attempt resumed from what it would supersede: its attempt hung
    between its choice and its record, and commits nothing any more.

    Raises:
        NewerFormatError: a resume record is of a newer format, so it isn't known what counts.
        StorageError: the storage can't be read.
    """
    prefix = attempts_prefix(run_id)
    resumed: dict[int, CheckpointId] = {}
    for key in [found.key for found in storage.list(prefix)]:
        number, _, suffix = key.removeprefix(prefix).partition(".")
        if number.isdecimal() and suffix == "json" and (record := _resume_record(storage, key)):
            resumed[int(number)] = record
    in_force: dict[int, CheckpointId] = {}
    for attempt, record in sorted(resumed.items(), reverse=True):
        if not any(newer.attempt < attempt and newer > record for newer in in_force.values()):
            in_force[attempt] = record
    return lambda checkpoint: any(
        checkpoint.attempt < newer and checkpoint > record for newer, record in in_force.items()
    )


def _resume_record(storage: Storage, key: str) -> CheckpointId | None:
    try:
        values = RESUME.from_bytes(storage.read(key), location(storage, key))
        begun = CheckpointId(int(values["step"]), int(values["of_attempt"]))
    except ObjectNotFoundError:
        return None
    except DAMAGE as error:
        logger.warning("%s is damaged and left out: %r", key, error)
        return None
    # How far another run was says nothing about this one.
    return begun if begun.attempt else FROM_NOTHING


def write_failure(storage: Storage, run_id: str, record: FailureRecord) -> None:
    """Put a failed attempt on record."""
    key = f"{_FAILURES.format(run_id)}{record.attempt:06d}.json"
    storage.write(key, FAILURE.to_bytes(asdict(record)))


def read_failures(storage: Storage, run_id: str) -> list[FailureRecord]:
    """Return the attempts that failed, oldest first; damaged records are left out, warned of.

    Raises:
        NewerFormatError: a record is of a newer format.
        StorageError: the storage can't be read.
    """
    found = []
    for stored in storage.list(_FAILURES.format(run_id)):
        try:
            where = location(storage, stored.key)
            values = FAILURE.from_bytes(storage.read(stored.key), where)
            found.append(build(FailureRecord, values))
        except DAMAGE as error:
            logger.warning("%s is damaged and left out: %r", stored.key, error)
    return sorted(found, key=lambda record: record.attempt)
