"""Owns the commit of a checkpoint, and what is cleaned up after it. Only rank 0 commits.

Owns the decision which checkpoints are kept. Pure.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded, superseded_test
from prefect_torch_ddp.checkpoint.keys import (
    checkpoints_prefix,
    is_manifest,
    manifest_key,
    owner_of,
)
from prefect_torch_ddp.checkpoint.manifest import Manifest, all_manifests, ranked
from prefect_torch_ddp.errors import (
    CheckpointError,
    DamagedObjectError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.storage.protocol import KeepsUnfinished, Storage


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the newest ones, and the best ones by a metric."""

    keep_last: int = 2
    keep_best: int = 1
    best_metric: str | None = None
    best_mode: Literal["max", "min"] = "max"


def superfluous(manifests: Sequence[Manifest], retention: Retention) -> list[Manifest]:
    """Return those that may be deleted, oldest first; the newest is never among them."""
    by_step = sorted(manifests, key=lambda manifest: manifest.step)
    kept = {manifest.step for manifest in by_step[-max(retention.keep_last, 1) :]}
    if retention.best_metric is not None:
        kept |= {
            manifest.step
            for manifest in ranked(by_step, retention.best_metric, retention.best_mode)[
                : retention.keep_best
            ]
        }
    return [manifest for manifest in by_step if manifest.step not in kept]


logger = logging.getLogger(__name__)


class Committer:
    """Makes checkpoints of one attempt of a run complete, and deletes what isn't needed after
    that.
    """

    def __init__(self, storage: Storage, run_id: str, attempt: int, retention: Retention) -> None:
        """Know nothing yet of the run's checkpoints; the first commit lists them."""
        self._storage = storage
        self._run_id = run_id
        self._attempt = attempt
        self._retention = retention
        self._known: dict[int, Manifest] | None = None
        self.last: Manifest | None = None
        """The newest commit of this attempt."""

    def commit(self, manifest: Manifest) -> None:
        """Put the checkpoint on record, and clean up.

        Raises:
            SupersededError: a newer attempt has begun; it may have done so after this commit,
                and before what that would delete.
            StorageError: the manifest can't be written.
        """
        refuse_superseded(self._storage, self._run_id, self._attempt)
        self._put(manifest_key(self._run_id, manifest.step, self._attempt), manifest.as_bytes())
        self.last = manifest
        logger.info("checkpoint of step %d is complete", manifest.step)
        self._try_to_clean_up(manifest)

    def clean_up_after(self, manifest: Manifest) -> None:
        """Clean up after the training's last checkpoint, which an older attempt committed and
        may have been killed right then.

        Raises:
            SupersededError: a newer attempt has begun.
            StorageError: the storage doesn't say whether one has.
        """
        refuse_superseded(self._storage, self._run_id, self._attempt)
        self._try_to_clean_up(manifest)

    def _try_to_clean_up(self, manifest: Manifest) -> None:
        try:
            self._clean_up(manifest)
        except StorageError as error:
            logger.warning("old checkpoints of run %s are not cleaned up: %s", self._run_id, error)

    def _put(self, key: str, data: bytes) -> None:
        """Write the manifest. One that is there already is this attempt's too, of a try that
        arrived though it seemed to fail.

        Not by a write that replaces: one that a storage carries out late would undo a newer
        one.
        """
        if self._storage.write_if_absent(key, data) or self._read(key) == data:
            return
        self._storage.delete(key)
        if not self._storage.write_if_absent(key, data):
            msg = f"the manifest {key} is there again: an earlier try to write it has arrived late"
            raise CheckpointError(msg)

    def _read(self, key: str) -> bytes | None:
        try:
            return self._storage.read(key)
        except (ObjectNotFoundError, DamagedObjectError):
            return None

    def _clean_up(self, manifest: Manifest) -> None:
        """Delete what the commit made superfluous.

        Who claims an attempt after the look for newer ones here sees the commit, and won't ask
        for what is deleted. Whoever did so before it may not have seen it: then it may be void.
        """
        refuse_superseded(self._storage, self._run_id, self._attempt)
        if self._known is None:
            self._known = self._look(manifest.step)
        # A step beyond this one is what an older attempt left damaged, or this attempt would
        # have been resumed from there.
        damaged = [known for step, known in self._known.items() if step > manifest.step]
        self._known[manifest.step] = manifest
        good = [known for step, known in self._known.items() if step <= manifest.step]
        for old in [*damaged, *superfluous(good, self._retention)]:
            refuse_superseded(self._storage, self._run_id, self._attempt)
            self._delete(old)
            del self._known[old.step]

    def _delete(self, old: Manifest) -> None:
        """Delete a checkpoint of this or an older attempt: its manifest first, so that nobody
        reads one with holes.

        Nobody else's: a newer attempt that made the same step has it under keys of its own, so
        a delete that is held up until then doesn't hit it.
        """
        self._storage.delete(manifest_key(self._run_id, old.step, old.attempt))
        for item in old.objects:
            self._storage.delete(item.key)

    def _look(self, step: int) -> dict[int, Manifest]:
        """Return what there is, by step; delete what a newer attempt made void or made anew,
        and sweep the rest.
        """
        # A newer attempt may have begun since the look for it: what it makes is not ours to
        # keep or to delete.
        manifests = [
            known
            for known in all_manifests(self._storage, self._run_id)
            if known.attempt <= self._attempt
        ]
        is_superseded = superseded_test(self._storage, self._run_id)
        known = {
            manifest.step: manifest
            for manifest in manifests
            if not is_superseded(manifest.step, manifest.attempt)
        }
        for manifest in manifests:
            if manifest is not known.get(manifest.step):
                refuse_superseded(self._storage, self._run_id, self._attempt)
                self._delete(manifest)
        self._sweep(known.values(), step)
        return known

    def look_again(self) -> None:
        """Have the next commit list what there is: a checkpoint failed, and may have left
        objects, or be there all the same.
        """
        self._known = None

    def _sweep(self, manifests: Collection[Manifest], step: int) -> None:
        """Delete what is left of checkpoints that can't become complete any more: those of
        older attempts, and of older steps.

        Of later steps of this attempt other ranks may have written objects already.
        """

        def is_over(key: str) -> bool:
            owner = owner_of(self._run_id, key)
            return owner is not None and (
                owner[1] < self._attempt or (owner[1] == self._attempt and owner[0] < step)
            )

        needed = {
            manifest_key(self._run_id, manifest.step, manifest.attempt) for manifest in manifests
        }
        needed |= {item.key for manifest in manifests for item in manifest.objects}
        prefix = checkpoints_prefix(self._run_id)
        there = [found.key for found in self._storage.list(prefix)]
        # A manifest, one that is damaged or came too late, before what it names.
        for key in sorted(there, key=is_manifest, reverse=True):
            if is_over(key) and key not in needed:
                self._storage.delete(key)
        if isinstance(self._storage, KeepsUnfinished):
            try:
                self._storage.drop_unfinished(prefix, is_over)
            except StorageError as error:  # it takes rights that nothing else does: retention must not fail for want of them
                logger.warning(
                    "what killed attempts left of uploads in parts is not cleaned up: %s", error
                )
