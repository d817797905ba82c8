"""Owns the record of a run's failed attempts, which outlives the process that saw them."""

import json
import logging
from dataclasses import asdict

from prefect_torch_ddp.checkpoint.keys import failure_key, failures_prefix
from prefect_torch_ddp.messages import FailureRecord
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)


def write_failure(storage: Storage, run_id: str, record: FailureRecord) -> None:
    """Put a failed attempt on record."""
    storage.write(failure_key(run_id, record.attempt), json.dumps(asdict(record), indent=1).encode())


def read_failures(storage: Storage, run_id: str) -> list[FailureRecord]:
    """Return the attempts that failed, oldest first; a record that can't be read is left out with a warning."""
    found = []
    for stored in storage.list(failures_prefix(run_id)):
        try:
            found.append(FailureRecord(**json.loads(storage.read(stored.key))))
        except (ValueError, TypeError) as error:
            logger.warning("%s is no record of a failure and is left out: %s", stored.key, error)
    return sorted(found, key=lambda record: record.attempt)
