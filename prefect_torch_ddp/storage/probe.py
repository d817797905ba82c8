"""Owns the probe that shows, before a run starts, whether a storage does what checkpoints rely
on.
"""

import uuid
from contextlib import suppress

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.protocol import Storage


def probe(storage: Storage) -> None:
    """Write, conditionally write, list, read and delete a small object.

    Raises:
        StorageError: the storage failed, or ignores the condition; says what to do.
    """
    key = f"probes/{uuid.uuid4().hex}"
    try:
        _probe_writes(storage, key)
    except Exception:
        with suppress(StorageError):  # the first fault is the one to tell
            storage.delete(key)
        raise
    storage.delete(key)
    if any(found.key == key for found in storage.list(key)):
        msg = f"{storage.uri} still lists {key} after it was deleted: old checkpoints would never go; use a consistent store"
        raise StorageError(msg)


def _probe_writes(storage: Storage, key: str) -> None:
    first, second, third = b"first", b"second!", b"third, by overwriting"
    won = storage.write_if_absent(key, first)
    won_again = storage.write_if_absent(key, second)
    kept = storage.read(key)
    if not won or won_again or kept != first:
        msg = (
            f"{storage.uri} doesn't honour conditional writes (If-None-Match: *): two runs could commit the same checkpoint. "
            "Use a store that does, such as AWS S3, Ceph or a current MinIO, or a directory"
        )
        raise StorageError(msg)
    storage.write(key, third)
    if storage.read(key) != third:
        msg = f"{storage.uri} returned old content after an object was overwritten; use a store that reads back what was written"
        raise StorageError(msg)
    if [found.num_bytes for found in storage.list(key)] != [len(third)]:
        msg = f"{storage.uri} doesn't list the object {key} that was just written; use a store with consistent listings"
        raise StorageError(msg)
