"""Owns the files of a run's results: each attempt has its own, so that one that was held up can't replace a newer one's."""

from prefect_torch_ddp.checkpoint.keys import result_key, result_of, results_prefix
from prefect_torch_ddp.errors import InvalidParamsError, ObjectNotFoundError
from prefect_torch_ddp.storage.keys import check_key
from prefect_torch_ddp.storage.protocol import Storage


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
        msg = f"rank.save({path!r}) was given a {type(data).__name__}; it takes bytes or text, such as json.dumps of plain values"
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
    there = {found.key: result_of(run_id, found.key) for found in storage.list(results_prefix(run_id))}
    saved = {result: key for key, result in there.items() if result is not None}
    newest = max((attempt for attempt, name in saved if name == path), default=None)
    if newest is None:
        names = ", ".join(sorted({name for _, name in saved})) or "none"
        msg = f"run {run_id} saved no {path} in {storage.uri}; its files are: {names}"
        raise ObjectNotFoundError(msg)
    return storage.read(saved[newest, path])
