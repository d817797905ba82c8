"""The commit of a checkpoint by rank 0, and the deletion of those that are no longer needed.

Nothing is deleted that a manifest may need which couldn't be read and understood: one that is
damaged, or was written by a later version of this package.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Container, Sequence
from contextlib import suppress

from prefect_torch_ddp.checkpoint.attempts import refuse_superseded, write_end
from prefect_torch_ddp.checkpoint.keys import (
    CheckpointId,
    checkpoints_prefix,
    is_manifest,
    manifest_key,
    owner_of,
)
from prefect_torch_ddp.checkpoint.manifest import (
    Manifest,
    live_manifests,
    ranked,
    read_manifest,
)
from prefect_torch_ddp.errors import (
    CheckpointError,
    DamagedObjectError,
    NewerFormatError,
    ObjectNotFoundError,
    StorageError,
)
from prefect_torch_ddp.params import COUNTED_INTERVALS, CheckpointParams
from prefect_torch_ddp.storage.protocol import Storage

KEPT_S = 30.0
"""How long a checkpoint stays at least while the training runs, if the interval adapts: an
evaluation that has found the newest one still has to start ranks and read it."""
MOST_YOUNG = 15
"""How many stay for that besides the `keep_last` newest: as many as an interval that adapts makes
in that time."""
MOST_YOUNG_ASKED_FOR = 2
"""The same if checkpoints are asked for by steps or epochs, which may come at any pace: the disk
has to hold them."""

logger = logging.getLogger(__name__)


def superfluous(
    manifests: Sequence[Manifest], policy: CheckpointParams, young: Container[int] = ()
) -> list[Manifest]:
    """Return those that may be deleted, oldest first; never the newest, nor steps in `young`."""
    by_step = sorted(manifests, key=lambda manifest: manifest.step)
    kept = {manifest.step for manifest in by_step[-policy.keep_last :]}
    if policy.best_metric is not None:
        order = ranked(by_step, policy.best_metric, policy.best_is)
        kept |= {manifest.step for manifest in order[: policy.keep_best]}
    return [each for each in by_step if each.step not in kept and each.step not in young]


class Committer:
    """Completes the checkpoints of one attempt of a run, and deletes what isn't needed then."""

    def __init__(
        self,
        storage: Storage,
        run_id: str,
        attempt: int,
        policy: CheckpointParams,
        on_commit: Callable[[Manifest], None] | None = None,
    ) -> None:
        self.run_id = run_id
        self.storage = storage
        self._attempt = attempt
        self.policy = policy
        self._on_commit = on_commit
        self._known: dict[int, Manifest] | None = None  # the first commit lists them
        self._is_left: Callable[[str], bool] = lambda _: False
        self._made_s: dict[int, float] = {}
        self.last: Manifest | None = None
        """The newest commit of this attempt."""

    def commit(self, manifest: Manifest, *, is_last: bool = False) -> None:
        """Put the checkpoint on record, and clean up; `is_last`: none follows.

        Raises:
            SupersededError: a newer attempt has begun, perhaps right after this commit.
        """
        self._refuse_superseded()
        self._put(manifest_key(self.run_id, manifest.step, self._attempt), manifest.as_bytes())
        self.last = manifest
        self._made_s[manifest.step] = time.monotonic()
        if self._on_commit is not None:
            self._on_commit(manifest)
        self.clean_up(manifest, is_last=is_last)

    def write_end(self, step: int, of_attempt: int | None) -> None:
        """Put on record that the function had ended with a checkpoint, of this attempt or another.

        Where the storage fails nothing is lost: everything that was trained is in the checkpoint.

        Raises:
            SupersededError: a newer attempt has begun, whose end this record would replace.
        """
        attempt = self._attempt if of_attempt is None else of_attempt
        with suppress(StorageError):
            self._refuse_superseded()
            write_end(self.storage, self.run_id, CheckpointId(step, attempt))

    @property
    def is_clean(self) -> bool:
        """Whether this attempt has committed something and left nothing superfluous."""
        if self.last is None or self._known is None:
            return False
        return not superfluous(list(self._known.values()), self.policy)

    def clean_up(self, manifest: Manifest, *, is_last: bool = False) -> None:
        """Delete what the newest checkpoint made superfluous; warn if the storage fails.

        If the interval adapts, what is younger than `KEPT_S` stays until the last checkpoint, but
        for what is too many.
        """
        try:
            # Who claims an attempt after this check sees the commit and asks for nothing that is
            # deleted here. Who did so before may not have seen it, so it may be superseded.
            self._refuse_superseded()
            there = self._there(manifest.step)
            # An older attempt left a later step damaged, or this one would have resumed there.
            damaged = [known for step, known in there.items() if step > manifest.step]
            there[manifest.step] = manifest
            good = [known for step, known in there.items() if step <= manifest.step]
            young = set() if is_last else self._young()
            for old in [*damaged, *superfluous(good, self.policy, young)]:
                self._delete(old)
                del there[old.step]
        except StorageError as error:
            logger.warning("old checkpoints of run %s are not cleaned up: %s", self.run_id, error)

    def make_room(self, step: int) -> None:
        """Delete what only its age keeps, so that a checkpoint of this step has room, if possible.

        A full storage takes no commit, and so would never be cleaned up after one. What somebody
        may be about to read is the smaller loss; the newest checkpoint stays.

        Raises:
            SupersededError: a newer attempt has begun, which may be reading them.
        """
        last = -1 if self.last is None else self.last.step
        with suppress(StorageError):
            self._refuse_superseded()
            there = self._there(step)
            # Not a later one of this attempt, whose commit seemed to fail: it isn't the newest for
            # sure. Of an older attempt none is live that is newer than what this one resumed from.
            good = [
                each for each in there.values() if each.attempt < self._attempt or each.step <= last
            ]
            for old in superfluous(good, self.policy):
                self._delete(old)
                del there[old.step]

    def look_again(self) -> None:
        """List the checkpoints at the next commit: one failed, and may be there all the same."""
        self._known = None

    def _there(self, step: int) -> dict[int, Manifest]:
        """Return the checkpoints that count, by step; list them if they aren't known."""
        if self._known is None:
            self._known = self._look(step)
            # When an earlier attempt made them isn't known: perhaps just now.
            self._made_s = dict.fromkeys(self._known, time.monotonic()) | self._made_s
        return self._known

    def _young(self) -> set[int]:
        """Return the steps of those that somebody may be about to read."""
        if self.policy.every_s != "auto":
            return set()
        now_s = time.monotonic()
        self._made_s = {step: at for step, at in self._made_s.items() if now_s - at < KEPT_S}
        is_asked_for = any(getattr(self.policy, name) for name in COUNTED_INTERVALS)
        most = MOST_YOUNG_ASKED_FOR if is_asked_for else MOST_YOUNG
        return set(sorted(self._made_s)[-self.policy.keep_last - most :])

    def _refuse_superseded(self) -> None:
        refuse_superseded(self.storage, self.run_id, self._attempt)

    def _put(self, key: str, data: bytes) -> None:
        # Not by a write that replaces: one that a storage carries out late would undo a newer
        # one. A manifest that is there is this attempt's, of a write that only seemed to fail.
        if self.storage.write_if_absent(key, data):
            return
        with suppress(ObjectNotFoundError, DamagedObjectError):
            if self.storage.read(key) == data:
                return
        self.storage.delete(key)
        if not self.storage.write_if_absent(key, data):
            msg = f"the manifest {key} is there again: an earlier try to write it has arrived late"
            raise CheckpointError(msg)

    def _delete(self, old: Manifest) -> None:
        """Delete a checkpoint of this or an older attempt.

        A delete that is delayed hits no newer attempt's checkpoint, which has its own keys.
        """
        self._refuse_superseded()
        # The manifest first, so that nobody reads a checkpoint with holes.
        self.storage.delete(manifest_key(self.run_id, old.step, old.attempt))
        for item in old.objects:
            if not self._is_left(item.key):
                self.storage.delete(item.key)

    def _look(self, step: int) -> dict[int, Manifest]:
        """Return the checkpoints that count, by step; delete the remains of all others."""
        # What a newer attempt made, since the check for one, is not ours to keep or delete.
        live = live_manifests(self.storage, self.run_id, allow_newer=True)
        known = {found.step: found for found in live if found.attempt <= self._attempt}
        self._sweep(known.values(), step)
        return known

    def _sweep(self, manifests: Collection[Manifest], step: int) -> None:
        """Delete the remains of checkpoints that can't become complete any more."""

        def is_over(key: str) -> bool:
            if self._is_left(key):
                return False
            # Of this attempt's later steps other ranks may have written objects already.
            owner = owner_of(self.run_id, key)
            return owner is not None and (owner.attempt, owner.step) < (self._attempt, step)

        needed = {
            manifest_key(self.run_id, manifest.step, manifest.attempt) for manifest in manifests
        }
        needed |= {item.key for manifest in manifests for item in manifest.objects}
        prefix = checkpoints_prefix(self.run_id)
        there = [found.key for found in self.storage.list(prefix)]
        self._is_left = self._not_understood([key for key in there if key not in needed])
        # A manifest that came late before what it names.
        for key in sorted(there, key=is_manifest, reverse=True):
            if is_over(key) and key not in needed:
                if is_manifest(key):
                    self._refuse_superseded()
                self.storage.delete(key)
        try:
            self.storage.drop_unfinished(prefix, is_over)
        except StorageError as error:
            # It takes rights that nothing else does; retention must not fail for want of them.
            logger.warning("unfinished uploads of killed attempts are left: %s", error)

    def _not_understood(self, there: Collection[str]) -> Callable[[str], bool]:
        """Return the test whether one of these manifests that isn't understood may need a key.

        It may need all of its own checkpoint's, and those that its text has.
        """
        owners: set[CheckpointId] = set()
        texts: list[bytes] = []
        for key in there:
            owner = owner_of(self.run_id, key)
            if owner is None or not is_manifest(key):
                continue
            try:
                read_manifest(self.storage, self.run_id, *owner)
            except (CheckpointError, NewerFormatError) as error:
                if isinstance(error.__cause__, ObjectNotFoundError):
                    continue  # it was deleted since the listing
                logger.warning(
                    "%s is left as it is, with everything that belongs to it: %s", key, error
                )
                owners.add(owner)
                with suppress(ObjectNotFoundError, DamagedObjectError):
                    texts.append(self.storage.read(key))

        def is_left(key: str) -> bool:
            forms = key.encode(), json.dumps(key)[1:-1].encode()
            is_named = any(form in text for text in texts for form in forms)
            return is_named or owner_of(self.run_id, key) in owners

        return is_left
