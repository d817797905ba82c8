"""Owns how a rank gets back what a checkpoint holds."""

import json
import logging
from typing import Any, Self

from prefect_torch_ddp.checkpoint.beginnings import FROM_NOTHING, record_beginning
from prefect_torch_ddp.checkpoint.keys import rank_name
from prefect_torch_ddp.checkpoint.manifest import Manifest, read_manifest
from prefect_torch_ddp.checkpoint.meeting import Meeting, wait_for
from prefect_torch_ddp.checkpoint.resume import find_resumable, read_object
from prefect_torch_ddp.checkpoint.rng import restore_generators
from prefect_torch_ddp.checkpoint.serial import from_bytes
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)


class Restorer:
    """Restores objects in place from one checkpoint, or leaves them as they are where there is none."""

    def __init__(
        self, storage: Storage, manifest: Manifest | None, run_id: str, verified: dict[str, bytes] | None = None
    ) -> None:
        """Restore from the checkpoint of the manifest.

        Args:
            storage: where it is.
            manifest: None restores nothing.
            run_id: the run that goes on; a checkpoint of its own has to have everything.
            verified: objects by name that were read already.
        """
        self._storage = storage
        self.manifest = manifest
        self._run_id = run_id
        self._verified = verified or {}

    @classmethod
    def at_step(cls, storage: Storage, run_id: str, step: int | None) -> Self:
        """Restore from one checkpoint and no other.

        Raises:
            CheckpointError: there is none.
        """
        if step is None:
            msg = f"no checkpoint of run {run_id} was named to restore from"
            raise CheckpointError(msg)
        return cls(storage, read_manifest(storage, run_id, step), run_id)

    @classmethod
    def resuming(  # noqa: PLR0913, PLR0917 - whose checkpoint, and who asks
        cls, storage: Storage, run_id: str, resume_from: str | None, rank: int, attempt: int, meeting: Meeting
    ) -> Self:
        """Restore from the newest checkpoint that verifies, of this run or else of `resume_from`; rank 0 chooses for all.

        Raises:
            CheckpointError: rank 0 didn't choose; or `resume_from` has no checkpoint.
            StorageError: the storage failed.
        """
        if rank == 0:
            manifest, verified = _choose(storage, run_id, resume_from)
            record_beginning(storage, run_id, attempt, FROM_NOTHING if manifest is None else manifest.step)
            choice = None if manifest is None else {"run_id": manifest.run_id, "step": manifest.step}
            meeting.say("resume", json.dumps(choice))
            return cls(storage, manifest, run_id, verified)
        text = wait_for(meeting, "resume", speaker=0)
        if text is None:
            msg = f"rank 0 of run {run_id} ended without tracking anything; rank.track belongs on every rank"
            raise CheckpointError(msg)
        choice = json.loads(text)
        return cls(storage, None if choice is None else read_manifest(storage, **choice), run_id)

    def restore(self, name: str, item: Any) -> None:
        """Load a tracked object's state in place.

        Raises:
            CheckpointError: the checkpoint lacks it or it doesn't fit; names the object.
        """
        manifest = self.manifest
        if manifest is None:
            return
        what = f"checkpoint of step {manifest.step} of run {manifest.run_id}"
        found = manifest.find(name)
        if found is None:
            msg = f"the {what} has no object {name!r}; it has {', '.join(item.name for item in manifest.objects)}"
            if manifest.run_id != self._run_id:
                logger.warning("%s: it begins as it is", msg)
                return
            raise CheckpointError(msg)
        data = self._verified.pop(name, None)
        if data is None:
            data = read_object(self._storage, manifest, found)
        try:
            item.load_state_dict(from_bytes(data))
        except Exception as error:  # user classes refuse in every way
            msg = f"the {what} doesn't fit the tracked object {name!r}: {error}"
            raise CheckpointError(msg) from error

    def restore_generators(self, rank: int) -> bool:
        """Put a rank's random generators back; return False where the checkpoint has none for it."""
        found = self.manifest.find(rank_name(rank)) if self.manifest is not None else None
        if self.manifest is None or found is None:
            return False
        data = self._verified.pop(found.name, None)
        restore_generators(from_bytes(read_object(self._storage, self.manifest, found) if data is None else data))
        return True

    def release(self) -> None:
        """Forget what was read and nobody asked for."""
        self._verified.clear()


def _choose(storage: Storage, run_id: str, resume_from: str | None) -> tuple[Manifest | None, dict[str, bytes]]:
    found = find_resumable(storage, run_id)
    if found is None and resume_from is not None:
        found = find_resumable(storage, resume_from)
        if found is None:
            msg = f"resume_from is {resume_from!r}, but that run has no checkpoint in {storage.uri} that can be restored"
            raise CheckpointError(msg)
    if found is None:
        return None, {}
    logger.info("goes on from the checkpoint of step %d of run %s", found[0].step, found[0].run_id)
    return found
