"""Owns the claim on a run's next attempt, which fences older ones off."""

import json
import os
import socket
import time

from prefect_torch_ddp.checkpoint.keys import attempt_key, attempts_prefix
from prefect_torch_ddp.storage.protocol import Storage


def claim_attempt(storage: Storage, run_id: str) -> int:
    """Claim a run's next attempt, from 1; exactly one caller gets each, and older attempts can't commit checkpoints any more."""
    claim = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}).encode()
    attempt = newest_attempt(storage, run_id) + 1
    while not storage.write_if_absent(attempt_key(run_id, attempt), claim):
        attempt += 1
    return attempt


def newest_attempt(storage: Storage, run_id: str) -> int:
    """Return the newest attempt that was claimed; 0 where none was."""
    prefix = attempts_prefix(run_id)
    numbers = (found.key.removeprefix(prefix) for found in storage.list(prefix))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)
