"""Restoring: the choice of the checkpoint to resume from, and its way into the tracked objects."""

import json
import logging
from collections.abc import Collection
from typing import Any, Self

import torch

from prefect_torch_ddp.checkpoint.attempts import FROM_NOTHING, record_resume, refuse_superseded
from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix, rank_name
from prefect_torch_ddp.checkpoint.manifest import (
    Manifest,
    ManifestObject,
    live_manifests,
    read_manifest,
)
from prefect_torch_ddp.checkpoint.objects import ReadState, read_state, read_states
from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore, wait_for
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.checkpoint.serial import restore_generators
from prefect_torch_ddp.errors import CheckpointError
from prefect_torch_ddp.storage.protocol import Storage

Found = tuple[Manifest, dict[str, ReadState]]
"""A checkpoint that verifies, with its states by name."""

logger = logging.getLogger(__name__)


class Restorer:
    """Restores objects in place from one checkpoint; where there is none, leaves them alone."""

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest | None,
        verified: dict[str, ReadState] | None = None,
        *,
        is_ours: bool = True,
    ) -> None:
        """Restore from the checkpoint of the manifest; None restores nothing.

        `verified` are states by name that were read already. A checkpoint that `is_ours`, of
        the run that resumes, must have everything.
        """
        self._storage = storage
        self.manifest = manifest
        self._verified = verified or {}
        self.is_ours = is_ours

    @classmethod
    def at_step(cls, storage: Storage, run_id: str, step: int | None, attempt: int | None) -> Self:
        """Restore from one checkpoint and no other, as `ResumePoint` names it.

        Raises:
            CheckpointError: there is none.
        """
        if step is None:
            msg = f"no checkpoint of run {run_id} was named to restore from"
            raise CheckpointError(msg)
        return cls(storage, ResumePoint(storage, run_id, step, attempt).manifest())

    @classmethod
    def choose(
        cls,
        own: ResumePoint,
        attempt: int,
        resume_from: ResumePoint | None,
        rank_store: KeyValueStore,
        kept: Collection[str] = (),
    ) -> Self:
        """Restore, on rank 0, from the newest checkpoint that verifies; tell the other ranks.

        A run without a checkpoint of its own begins from `resume_from`. The attempt's resume
        record is written. `kept` names objects that keep the tensors they are given.

        Raises:
            CheckpointError: there are checkpoints and none can be restored.
            SupersededError: a newer attempt has begun, which may have deleted what this one was
                about to read.
            StorageError: the storage failed.
        """
        try:
            chosen = cls._choose(own, resume_from, kept)
        except CheckpointError:
            refuse_superseded(own.storage, own.run_id, attempt)
            raise
        at = None if chosen.manifest is None else (chosen.manifest.step, chosen.manifest.attempt)
        step, of_attempt = at or (FROM_NOTHING, 0)
        record_resume(own.storage, own.run_id, attempt, step, of_attempt if chosen.is_ours else 0)
        # An attempt claimed after this check sees the record. One claimed before may have missed
        # it, and this attempt's steps would stay in metrics and ledger.
        refuse_superseded(own.storage, own.run_id, attempt)
        rank_store.set("resume", json.dumps({"at": at, "is_ours": chosen.is_ours}))
        return chosen

    @classmethod
    def follow(
        cls, own: ResumePoint, resume_from: ResumePoint | None, rank_store: KeyValueStore
    ) -> Self:
        """Restore from what rank 0 chose.

        Raises:
            CheckpointError: rank 0 didn't choose, or it can't be restored.
            StorageError: the storage failed.
        """
        text = wait_for(rank_store, "resume", rank=0)
        if text is None:
            msg = f"rank 0 of run {own.run_id} tracked nothing; ctx.track belongs on every rank"
            raise CheckpointError(msg)
        choice = json.loads(text)
        where = own if choice["is_ours"] else resume_from
        assert where is not None
        at = choice["at"]
        manifest = None if at is None else read_manifest(where.storage, where.run_id, *at)
        return cls(where.storage, manifest, is_ours=choice["is_ours"])

    @classmethod
    def _choose(
        cls, own: ResumePoint, resume_from: ResumePoint | None, kept: Collection[str]
    ) -> Self:
        where, found = own, find_resumable(own.storage, own.run_id, kept)
        if found is None and resume_from is not None:
            where, found = resume_from, _read_resume_point(resume_from, kept)
        if found is None:
            return cls(own.storage, None)
        manifest, verified = found
        elsewhere = f", {where.uri}" if where.storage != own.storage else ""
        text = "resuming from the checkpoint of step %d of run %s%s"
        logger.info(text, manifest.step, manifest.run_id, elsewhere)
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
            there = ", ".join(item.name for item in manifest.objects)
            msg = f"the {what} has no object {name!r}; it has {there}"
            if not self.is_ours:
                logger.warning("%s: it keeps its initial state", msg)
                return
            raise CheckpointError(msg)
        read = self._take(manifest, found)
        try:
            item.load_state_dict(read.to_keep() if keeps_its_state(item) else read.state)
        except Exception as error:  # user classes refuse in every way
            msg = f"the {what} doesn't fit the tracked object {name!r}: {error}"
            raise CheckpointError(msg) from error

    def restore_generators(self, rank: int) -> bool:
        """Put a rank's random generators back; False where the checkpoint has none for it."""
        found = None if self.manifest is None else self.manifest.find(rank_name(rank))
        if self.manifest is None or found is None:
            return False
        restore_generators(self._take(self.manifest, found).to_keep())
        return True

    def read_generators(self, rank: int) -> Any | None:
        """Return the state of a rank's random generators; None where there is none for it."""
        found = self.manifest.find(rank_name(rank)) if self.manifest is not None else None
        if self.manifest is None or found is None:
            return None
        return read_state(self._storage, self.manifest, found).state

    def release(self) -> None:
        """Forget states that were read but not used."""
        self._verified.clear()

    def _take(self, manifest: Manifest, item: ManifestObject) -> ReadState:
        # Out of `verified`: nobody asks again, and the memory is needed.
        if item.name in self._verified:
            return self._verified.pop(item.name)
        return read_state(self._storage, manifest, item)


def keeps_its_state(item: Any) -> bool:
    """Tell whether an object may keep the tensors it is given: optimizers do, modules copy."""
    return not isinstance(item, torch.nn.Module)


def _read_resume_point(point: ResumePoint, kept: Collection[str]) -> Found:
    if point.step is not None:
        manifest = point.manifest()
        return manifest, read_states(point.storage, manifest, manifest.objects, kept)
    found = find_resumable(point.storage, point.run_id, kept)
    if found is None:
        where = point.storage.uri
        msg = f"resume_from is {point.run_id!r}, but that run has no checkpoint in {where}"
        raise CheckpointError(msg)
    return found


def find_resumable(storage: Storage, run_id: str, kept: Collection[str] = ()) -> Found | None:
    """Return the newest checkpoint whose objects all verify; warn about newer ones that don't.

    None where the run has no checkpoint.

    Raises:
        CheckpointError: it has some, and none verifies. Whether to start over is for a person
            to decide.
        StorageError: the storage failed; falling back then would throw away work that isn't
            lost.
    """
    faults: list[str] = []
    for manifest in reversed(live_manifests(storage, run_id, faults)):
        try:
            return manifest, read_states(storage, manifest, manifest.objects, kept)
        except CheckpointError as error:
            logger.warning("%s; the one before it is tried", error)
            faults.append(str(error))
    if faults:
        msg = (
            f"run {run_id} has checkpoints in {storage.uri}, and none of them can be restored: "
            f"{'; '.join(faults)}. Repair them, or delete {checkpoints_prefix(run_id)} there to "
            "begin anew"
        )
        raise CheckpointError(msg)
    return None
