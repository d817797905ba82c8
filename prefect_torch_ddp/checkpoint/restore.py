"""Owns how a rank gets back what a checkpoint holds."""

import json
import logging
from typing import Any, Self

from prefect_torch_ddp.checkpoint.beginnings import FROM_NOTHING, record_beginning
from prefect_torch_ddp.checkpoint.keys import rank_name
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject, read_manifest
from prefect_torch_ddp.checkpoint.meeting import Meeting, wait_for
from prefect_torch_ddp.checkpoint.reading import read_state, read_states
from prefect_torch_ddp.checkpoint.resume import find_resumable
from prefect_torch_ddp.checkpoint.rng import restore_generators
from prefect_torch_ddp.checkpoint.source import Source
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.protocol import Storage

logger = logging.getLogger(__name__)


class Restorer:
    """Restores objects in place from one checkpoint, or leaves them as they are where there is none."""

    def __init__(
        self, storage: Storage, manifest: Manifest | None, verified: dict[str, Any] | None = None, *, is_ours: bool = True
    ) -> None:
        """Restore from the checkpoint of the manifest.

        Args:
            storage: where it is.
            manifest: None restores nothing.
            verified: states by name that were read already.
            is_ours: whether it is of the run that goes on; then it has to have everything.
        """
        self._storage = storage
        self.manifest = manifest
        self._verified = verified or {}
        self.is_ours = is_ours

    @classmethod
    def at_step(cls, storage: Storage, run_id: str, step: int | None) -> Self:
        """Restore from one checkpoint and no other.

        Raises:
            CheckpointError: there is none.
        """
        if step is None:
            msg = f"no checkpoint of run {run_id} was named to restore from"
            raise CheckpointError(msg)
        return cls(storage, read_manifest(storage, run_id, step))

    @classmethod
    def resuming(cls, own: Source, attempt: int, resume_from: Source | None, rank: int, meeting: Meeting) -> Self:
        """Restore from the newest checkpoint that verifies, of this run or else from `resume_from`; rank 0 chooses for all.

        Args:
            own: this run.
            attempt: this attempt; where it goes on is put on record.
            resume_from: where a run without a checkpoint of its own begins.
            rank: this rank.
            meeting: where rank 0 says what it chose.

        Raises:
            CheckpointError: rank 0 didn't choose; or there are checkpoints and none can be restored.
            StorageError: the storage failed.
        """
        if rank == 0:
            chosen = cls._choose(own, resume_from)
            step = None if chosen.manifest is None else chosen.manifest.step
            record_beginning(own.storage, own.run_id, attempt, FROM_NOTHING if step is None else step)
            meeting.say("resume", json.dumps({"step": step, "is_ours": chosen.is_ours}))
            return chosen
        text = wait_for(meeting, "resume", speaker=0)
        if text is None:
            msg = f"rank 0 of run {own.run_id} ended without tracking anything; rank.track belongs on every rank"
            raise CheckpointError(msg)
        choice = json.loads(text)
        where = own if choice["is_ours"] else resume_from
        assert where is not None
        manifest = None if choice["step"] is None else read_manifest(where.storage, where.run_id, choice["step"])
        return cls(where.storage, manifest, is_ours=choice["is_ours"])

    @classmethod
    def _choose(cls, own: Source, resume_from: Source | None) -> Self:
        found, where = find_resumable(own.storage, own.run_id), own
        if found is None and resume_from is not None:
            where = resume_from
            found = _begin_from(resume_from)
        if found is None:
            return cls(own.storage, None)
        manifest, verified = found
        of_other = f", {where.uri}" if where.storage != own.storage else ""
        logger.info("goes on from the checkpoint of step %d of run %s%s", manifest.step, manifest.run_id, of_other)
        return cls(where.storage, manifest, verified, is_ours=where is own)

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
            if not self.is_ours:
                logger.warning("%s: it begins as it is", msg)
                return
            raise CheckpointError(msg)
        state = self._state_of(manifest, found)
        try:
            item.load_state_dict(state)
        except Exception as error:  # user classes refuse in every way
            msg = f"the {what} doesn't fit the tracked object {name!r}: {error}"
            raise CheckpointError(msg) from error

    def restore_generators(self, rank: int) -> bool:
        """Put a rank's random generators back; return False where the checkpoint has none for it."""
        found = self.manifest.find(rank_name(rank)) if self.manifest is not None else None
        if self.manifest is None or found is None:
            return False
        restore_generators(self._state_of(self.manifest, found))
        return True

    def release(self) -> None:
        """Forget what was read and nobody asked for."""
        self._verified.clear()

    def _state_of(self, manifest: Manifest, item: ManifestObject) -> Any:
        # Taken out: nobody asks again, and the memory is needed.
        return self._verified.pop(item.name) if item.name in self._verified else read_state(self._storage, manifest, item)


def _begin_from(source: Source) -> tuple[Manifest, dict[str, Any]]:
    """Return the checkpoint of the step that was asked for, or else the newest one that verifies."""
    if source.step is not None:
        manifest = read_manifest(source.storage, source.run_id, source.step)
        return manifest, read_states(source.storage, manifest, manifest.objects)
    found = find_resumable(source.storage, source.run_id)
    if found is None:
        msg = f"resume_from is {source.run_id!r}, but that run has no checkpoint in {source.storage.uri} that can be restored"
        raise CheckpointError(msg)
    return found
