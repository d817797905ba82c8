"""Owns how the objects of a checkpoint are read: several at once, and hashed while they arrive; what verifies is decoded."""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.serial import from_bytes
from prefect_torch_ddp.errors import CheckpointError, ObjectNotFoundError
from prefect_torch_ddp.storage.protocol import ShowsContent, Storage

NUM_THREADS = 4
"""Hashing, copying and waiting for a storage leave Python's lock to others."""


def read_object(storage: Storage, manifest: Manifest, item: ManifestObject) -> memoryview:
    """Return the bytes of a checkpoint's object.

    Raises:
        CheckpointError: it is missing or isn't what was written; names it.
        StorageError: the storage failed, which says nothing about the object.
    """
    digest = hashlib.sha256()
    try:
        if isinstance(storage, ShowsContent):
            data = storage.read_seen(item.key, digest.update)
        else:
            data = memoryview(storage.read(item.key))
            digest.update(data)
    except ObjectNotFoundError as error:
        msg = f"checkpoint of step {manifest.step} of run {manifest.run_id}: its object {item.key} is missing"
        raise CheckpointError(msg) from error
    if digest.hexdigest() != item.sha256:
        msg = (
            f"checkpoint of step {manifest.step} of run {manifest.run_id}: its object {item.key} is damaged "
            f"({len(data)} bytes of {item.num_bytes}; the sha256 differs)"
        )
        raise CheckpointError(msg)
    return data


def read_state(storage: Storage, manifest: Manifest, item: ManifestObject) -> Any:
    """Return the state that an object holds, its tensors on the CPU; raises as `read_object`."""
    data = read_object(storage, manifest, item)
    try:
        return from_bytes(data)
    except Exception as error:  # torch refuses in every way
        msg = (
            f"checkpoint of step {manifest.step} of run {manifest.run_id}: its object {item.key} is what was written, and "
            f"this version of torch can't read it: {error}"
        )
        raise CheckpointError(msg) from error


def read_states(storage: Storage, manifest: Manifest, items: Iterable[ManifestObject]) -> dict[str, Any]:
    """Return the states of several objects by name; raises as `read_object`."""
    # The largest first: what remains at the end is short.
    ordered = sorted(items, key=lambda item: -item.num_bytes)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prefect-torch-ddp-restore") as pool:
        states = pool.map(lambda item: read_state(storage, manifest, item), ordered)
        return {item.name: state for item, state in zip(ordered, states, strict=True)}
