"""The probe: it shows, before a run starts, whether a storage does what checkpoints rely on."""

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
        fault = _fault_of_writes(storage, key)
    except Exception:
        with suppress(StorageError):  # the first fault is the one to report
            storage.delete(key)
        raise
    storage.delete(key)
    if not fault and any(found.key == key for found in storage.list(key)):
        fault = (
            f"still lists {key} after it was deleted: old checkpoints would never go; "
            "use a consistent store"
        )
    if fault:
        msg = f"{storage.uri} {fault}"
        raise StorageError(msg)


def _fault_of_writes(storage: Storage, key: str) -> str:
    first, second, third = b"first", b"second!", b"third, by overwriting"
    won, won_again = storage.write_if_absent(key, first), storage.write_if_absent(key, second)
    if not won or won_again or storage.read(key) != first:
        return (
            "doesn't honour conditional writes (If-None-Match: *): two runs could commit the same "
            "checkpoint. Use a store that does, such as AWS S3, Ceph or a current MinIO, or a "
            "directory"
        )
    storage.write(key, third)
    if storage.read(key) != third:
        return "returned old content after an object was overwritten; use a consistent store"
    if [found.num_bytes for found in storage.list(key)] != [len(third)]:
        return f"doesn't list the object {key} that was just written; use a consistent store"
    return ""
