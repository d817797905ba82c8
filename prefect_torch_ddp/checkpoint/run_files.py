"""A run's failure records, and the files that `ctx.save` wrote to its results.

Each attempt has its own, so that a late one can't replace a newer one's.
"""

import json
import logging
from dataclasses import asdict

from prefect_torch_ddp.errors import InvalidParamsError, ObjectNotFoundError
from prefect_torch_ddp.protocol.events import FailureRecord
from prefect_torch_ddp.storage.protocol import Storage, check_key

logger = logging.getLogger(__name__)


_FAILURES, _RESULTS = "runs/{}/failures/", "runs/{}/results/"


def write_failure(storage: Storage, run_id: str, record: FailureRecord) -> None:
    """Put a failed attempt on record."""
    key = f"{_FAILURES.format(run_id)}{record.attempt:06d}.json"
    storage.write(key, json.dumps(asdict(record), indent=1).encode())


def read_failures(storage: Storage, run_id: str) -> list[FailureRecord]:
    """Return the attempts that failed, oldest first; damaged records are left out, warned of."""
    found = []
    for stored in storage.list(_FAILURES.format(run_id)):
        try:
            found.append(FailureRecord(**json.loads(storage.read(stored.key))))
        except (ValueError, TypeError) as error:
            logger.warning("%s is no record of a failure and is left out: %s", stored.key, error)
    return sorted(found, key=lambda record: record.attempt)


def write_result(storage: Storage, run_id: str, attempt: int, path: str, data: object) -> None:
    """Write a file to an attempt's results; see `RankContext.save`."""
    check_key(path)
    content = data.encode() if isinstance(data, str) else data
    if not isinstance(content, bytes | bytearray | memoryview):
        given = f"ctx.save({path!r}) was given a {type(data).__name__}"
        msg = f"{given}; it takes bytes or text, such as json.dumps of plain values"
        raise InvalidParamsError(msg)
    storage.write(f"{_RESULTS.format(run_id)}{attempt:06d}/{path}", bytes(content))


def read_result(storage: Storage, run_id: str, path: str) -> bytes:
    """Return a file as the newest attempt that saved it left it.

    Raises:
        BadKeyError: the path would leave the results.
        ObjectNotFoundError: no attempt saved it; names those files that there are.
        StorageError: it can't be read.
    """
    check_key(path)
    prefix, keys, names = _RESULTS.format(run_id), {}, set()
    for found in storage.list(prefix):
        attempt, _, name = found.key.removeprefix(prefix).partition("/")
        if attempt.isdecimal() and name:
            names.add(name)
            if name == path:
                keys[int(attempt)] = found.key
    if not keys:
        there = ", ".join(sorted(names)) or "none"
        msg = f"run {run_id} saved no {path} in {storage.uri}; its files are: {there}"
        raise ObjectNotFoundError(msg)
    return storage.read(keys[max(keys)])
