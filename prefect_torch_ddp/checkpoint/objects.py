"""The objects of a checkpoint: several at once are read, verified and decoded.

An object's digest is its BLAKE3 (https://github.com/BLAKE3-team/BLAKE3), as the command `b3sum`
shows it; it takes a third of the time of sha256.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from blake3 import blake3

from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.serial import from_bytes
from prefect_torch_ddp.errors import (
    CheckpointError,
    DamagedObjectError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.protocol import Storage

NUM_THREADS = 4
"""Hashing, copying and waiting for a storage leave Python's lock to others."""
_LARGE_BYTES = 2**26
"""From here on an object is hashed by several threads."""
_SHORTAGE = "allocate memory"
"""Of a RuntimeError by which torch says that this machine has too little memory."""


def read_object(storage: Storage, manifest: Manifest, item: ManifestObject) -> bytes:
    """Return the bytes of a checkpoint's object.

    Raises:
        CheckpointError: it is missing or isn't what was written; names it.
        StorageError: the storage failed, which says nothing about the object.
    """
    with _explained(manifest, item):
        data = storage.read(item.key)
    max_threads = NUM_THREADS if len(data) >= _LARGE_BYTES else 1
    if blake3(data, max_threads=max_threads).hexdigest() != item.digest:
        reason = f"is damaged ({len(data)} bytes of {item.num_bytes}; the digest differs)"
        raise _unreadable(manifest, item, reason)
    return data


def read_state(storage: Storage, manifest: Manifest, item: ManifestObject) -> Any:
    """Return the state that an object holds, its tensors on the CPU; raises as `read_object`."""
    with _explained(manifest, item):
        return from_bytes(read_object(storage, manifest, item))


def read_states(
    storage: Storage, manifest: Manifest, items: Iterable[ManifestObject]
) -> dict[str, Any]:
    """Return the states of several objects by name; see `read_state`."""
    # The largest first: what remains at the end is short.
    by_size = sorted(items, key=lambda item: -item.num_bytes)
    pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prefect-torch-ddp-restore")
    try:
        states = pool.map(lambda item: read_state(storage, manifest, item), by_size)
        return {item.name: state for item, state in zip(by_size, states, strict=True)}
    finally:
        pool.shutdown(cancel_futures=True)


def digest_of(data: bytes | memoryview) -> str:
    """Return the content's BLAKE3 in hex; by one thread, as a training needs the others."""
    return blake3(data).hexdigest()


def _unreadable(manifest: Manifest, item: ManifestObject, reason: str) -> CheckpointError:
    checkpoint = f"checkpoint of step {manifest.step} of run {manifest.run_id}"
    return CheckpointError(f"{checkpoint}: its object {item.key} {reason}")


@contextmanager
def _explained(manifest: Manifest, item: ManifestObject) -> Iterator[None]:
    try:
        yield
    except ObjectNotFoundError as error:
        raise _unreadable(manifest, item, "is missing") from error
    except DamagedObjectError as error:
        raise _unreadable(manifest, item, f"is damaged: {error}") from error
    except (CheckpointError, StorageError):
        raise
    except Exception as error:  # torch refuses in every way
        if isinstance(error, MemoryError | OSError) or _SHORTAGE in str(error):
            raise  # the object is whole: an older checkpoint must not be taken for that
        reason = f"is what was written, and this version of torch can't read it: {error}"
        raise _unreadable(manifest, item, reason) from error
