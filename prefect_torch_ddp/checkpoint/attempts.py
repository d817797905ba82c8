"""Owns the claim on a run's next attempt, which fences older ones off."""

import json
import os
import socket
import time

from prefect_torch_ddp.checkpoint.keys import attempt_key, attempts_prefix
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.protocol import Storage


class SupersededError(CheckpointError):
    """A newer attempt of the run has begun; this one must not change its checkpoints any more."""


def claim_attempt(storage: Storage, run_id: str) -> int:
    """Claim a run's next attempt, from 1; exactly one caller gets each, and older attempts can't commit checkpoints any more."""
    attempt = newest_attempt(storage, run_id) + 1
    while not _claim(storage, run_id, attempt):
        attempt += 1
    return attempt


def claim_attempt_after(storage: Storage, run_id: str, own_attempt: int) -> int:
    """Claim the attempt that follows one's own.

    Raises:
        SupersededError: somebody else has it: the training goes on there, and this caller must not fence that off.
    """
    if not _claim(storage, run_id, own_attempt + 1):
        msg = (
            f"attempt {own_attempt} of run {run_id} has been superseded by attempt {newest_attempt(storage, run_id)}: "
            "it is not started again here"
        )
        raise SupersededError(msg)
    return own_attempt + 1


def _claim(storage: Storage, run_id: str, attempt: int) -> bool:
    claim = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}).encode()
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
