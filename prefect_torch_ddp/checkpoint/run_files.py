"""Owns the record of a run's failed attempts, which outlives the process that saw them.

Owns the files of a run's results: each attempt has its own, so that one that was held up can't
replace a newer one's.
"""

import json
import logging
from dataclasses import asdict

from prefect_torch_ddp.checkpoint.keys import (
    failure_key,
    failures_prefix,
    result_key,
    result_of,
    results_prefix,
)
from prefect_torch_ddp.errors import InvalidParamsError, ObjectNotFoundError
from prefect_torch_ddp.protocol.events import FailureRecord
from prefect_torch_ddp.storage.keys import check_key
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)


def write_failure(storage: Storage, run_id: str, record: FailureRecord) -> None:
    """Put a failed attempt on record."""
    storage.write(
        failure_key(run_id, record.attempt), json.dumps(asdict(record), indent=1).encode()
    )


def read_failures(storage: Storage, run_id: str) -> list[FailureRecord]:
    """Return the attempts that failed, oldest first; a record that can't be read is left out
    with a warning.
    """
    found = []
    for stored in storage.list(failures_prefix(run_id)):
        try:
            found.append(FailureRecord(**json.loads(storage.read(stored.key))))
        except (ValueError, TypeError) as error:
            logger.warning("%s is no record of a failure and is left out: %s", stored.key, error)
    return sorted(found, key=lambda record: record.attempt)


def write_result(storage: Storage, run_id: str, attempt: int, path: str, data: object) -> None:
    """Write a file to the results of an attempt.

    Args:
        storage: where the run is.
        run_id: the run.
        attempt: whose it is.
        path: relative, with forward slashes.
        data: the whole content, bytes or text; text is written as UTF-8.

    Raises:
        InvalidParamsError: the data are neither bytes nor text.
        BadKeyError: the path would leave the results.
        StorageError: it can't be written.
    """
    check_key(path)
    content = data.encode() if isinstance(data, str) else data
    if not isinstance(content, bytes | bytearray | memoryview):
        msg = f"ctx.save({path!r}) was given a {type(data).__name__}; it takes bytes or text, such as json.dumps of plain values"
        raise InvalidParamsError(msg)
    storage.write(result_key(run_id, attempt, path), bytes(content))


def read_result(storage: Storage, run_id: str, path: str) -> bytes:
    """Return a file as the newest attempt that saved it left it.

    Raises:
        BadKeyError: the path would leave the results.
        ObjectNotFoundError: no attempt saved it; names those files that there are.
        StorageError: it can't be read.
    """
    check_key(path)
    there = {
        found.key: result_of(run_id, found.key) for found in storage.list(results_prefix(run_id))
    }
    saved = {result: key for key, result in there.items() if result is not None}
    newest = max((attempt for attempt, name in saved if name == path), default=None)
    if newest is None:
        names = ", ".join(sorted({name for _, name in saved})) or "none"
        msg = f"run {run_id} saved no {path} in {storage.uri}; its files are: {names}"
        raise ObjectNotFoundError(msg)
    return storage.read(saved[newest, path])
