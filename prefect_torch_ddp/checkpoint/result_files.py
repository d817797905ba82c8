"""Owns the files of a run's results, which only its newest attempt may write."""

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded
from prefect_torch_ddp.checkpoint.keys import results_prefix
from prefect_torch_ddp.storage.keys import check_key
from prefect_torch_ddp.storage.protocol import Storage


def write_result(storage: Storage, run_id: str, path: str, data: bytes | str, attempt: int | None) -> None:
    """Write a file to the run's results.

    Args:
        storage: where the run is.
        run_id: the run.
        path: relative, with forward slashes.
        data: the whole content; text is written as UTF-8.
        attempt: the training's attempt that writes; None: something else than a training does.

    Raises:
        BadKeyError: the path would leave the results.
        SupersededError: a newer attempt has begun.
        StorageError: it can't be written.
    """
    check_key(path)
    if attempt is not None:
        refuse_superseded(storage, run_id, attempt)
    storage.write(f"{results_prefix(run_id)}{path}", data.encode() if isinstance(data, str) else data)
