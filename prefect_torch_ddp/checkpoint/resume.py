"""Owns the choice of the checkpoint that a training goes on from: the newest one whose objects all verify."""

import logging

from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject, list_manifests
from prefect_torch_ddp.checkpoint.serial import sha256_of
from prefect_torch_ddp.errors import CheckpointError, ObjectNotFoundError
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)


def read_object(storage: Storage, manifest: Manifest, item: ManifestObject) -> bytes:
    """Return a checkpoint's object.

    Raises:
        CheckpointError: it is missing or isn't what was written; names it.
        StorageError: the storage failed, which says nothing about the object.
    """
    try:
        data = storage.read(item.key)
    except ObjectNotFoundError as error:
        msg = f"checkpoint of step {manifest.step} of run {manifest.run_id}: its object {item.key} is missing"
        raise CheckpointError(msg) from error
    if sha256_of(data) != item.sha256:
        msg = (
            f"checkpoint of step {manifest.step} of run {manifest.run_id}: its object {item.key} is damaged "
            f"({len(data)} bytes of {item.num_bytes}; the sha256 differs)"
        )
        raise CheckpointError(msg)
    return data


def find_resumable(storage: Storage, run_id: str) -> tuple[Manifest, dict[str, bytes]] | None:
    """Return the newest checkpoint whose objects all verify, with their bytes by name; warn about each newer one that doesn't.

    None where the run has no checkpoint.

    Raises:
        CheckpointError: it has some, and none verifies. Whether to begin anew then is for a person to say.
        StorageError: the storage failed; falling back then would throw away work that isn't lost.
    """
    faults: list[str] = []
    for manifest in reversed(list_manifests(storage, run_id, faults)):
        try:
            return manifest, read_objects(storage, manifest)
        except CheckpointError as error:
            logger.warning("%s; the one before it is tried", error)
            faults.append(str(error))
    if faults:
        msg = (
            f"run {run_id} has checkpoints in {storage.uri}, and none of them can be restored: {'; '.join(faults)}. "
            f"Repair them, or delete {checkpoints_prefix(run_id)} there to begin anew"
        )
        raise CheckpointError(msg)
    return None


def read_objects(storage: Storage, manifest: Manifest) -> dict[str, bytes]:
    """Return a checkpoint's objects by name; raises as `read_object`."""
    return {item.name: read_object(storage, manifest, item) for item in manifest.objects}
