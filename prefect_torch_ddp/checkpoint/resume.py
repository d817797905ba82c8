"""Owns the choice of the checkpoint that a training goes on from: the newest one whose objects all verify."""

import logging
from collections.abc import Collection

from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix
from prefect_torch_ddp.checkpoint.manifest import Manifest, counting_manifests
from prefect_torch_ddp.checkpoint.reading import ReadState, read_states
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)


def find_resumable(storage: Storage, run_id: str, kept: Collection[str] = ()) -> tuple[Manifest, dict[str, ReadState]] | None:
    """Return the newest checkpoint whose objects all verify, with their states by name; warn about each newer one that doesn't.

    None where the run has no checkpoint.

    Raises:
        CheckpointError: it has some, and none verifies. Whether to begin anew then is for a person to say.
        StorageError: the storage failed; falling back then would throw away work that isn't lost.
    """
    faults: list[str] = []
    for manifest in reversed(counting_manifests(storage, run_id, faults)):
        try:
            return manifest, read_states(storage, manifest, manifest.objects, kept)
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
