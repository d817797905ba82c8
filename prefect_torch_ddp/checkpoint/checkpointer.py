"""Owns the writing of checkpoints beside the training: each rank its share, rank 0 the
commit.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import object_key, rank_name
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.objects import digest_of
from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore, wait_for
from prefect_torch_ddp.checkpoint.serial import Serializer, capture_generators, check_loadable
from prefect_torch_ddp.checkpoint.staging import Staging, has_buffers
from prefect_torch_ddp.errors import CheckpointError, StorageError, SupersededError
from prefect_torch_ddp.storage.protocol import Storage

ABSENT_S = 60.0
"""How long rank 0 waits in the midst of a training for a rank that hasn't begun the same
checkpoint; a step apart is usual."""

QUIET_S = 2.0
"""How long a step may wait for the checkpoint before without a word."""
WAITS = (
    "the training waits in step %d until the checkpoint before is written (long wait number %d): the storage takes them slower "
    "than they are asked for; ask for fewer, by checkpoint.every_steps or every_s"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Writer:
    """Which rank of which attempt writes, and where to."""

    storage: Storage
    run_id: str
    attempt: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class CheckpointMetadata:
    """What a checkpoint holds besides the tracked objects."""

    step: int
    """The number by which it is known: the optimizer steps, and beyond them the checkpoints
    that were made outside of them."""
    epoch: int
    position: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest values; those of rank 0 count."""
    is_last: bool = False
    """Whether the training ends with it; it may follow another one of the same step."""
    num_steps: int = 0
    """Optimizer steps alone.

    Where a rank left out a checkpoint outside of them, two moments of one number are not the
    same.
    """

    @property
    def turn(self) -> tuple[int, int]:
        """What grows with every checkpoint, and is the same on all ranks."""
        return 2 * self.step + self.is_last, self.num_steps

    def note_key(self, rank: int) -> str:
        """Return where a rank says what it wrote."""
        return f"written/{self.turn[0]}/{self.turn[1]}/{rank}"


class Checkpointer:
    """Writes checkpoints of a gang; every rank has one and saves at the same steps.

    The state is copied during the step, and serialised, hashed and written by a thread. There
    is no barrier: each rank tells rank 0 the digests of what it wrote, and rank 0 commits.
    """

    def __init__(
        self,
        writer: Writer,
        rank_store: KeyValueStore,
        committer: Committer,
        before_commit: Callable[[], None],
        on_failure: Literal["warn", "fail"] = "warn",
    ) -> None:
        """Make it; nothing is written yet.

        Args:
            writer: this rank.
            rank_store: where the ranks leave notes for each other.
            committer: used on rank 0.
            before_commit: writes what must not be lost when a resumed run begins after this
                checkpoint; may raise StorageError.
            on_failure: whether the training goes on when a checkpoint can't be written.
        """
        self._writer = writer
        self._rank_store = rank_store
        self._committer = committer
        self._before_commit = before_commit
        self._on_failure = on_failure
        self._staging = Staging()
        self._serializer = Serializer()
        self._checked: set[str] = set()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._num_long_waits = 0
        self.was_alone = False
        """Whether another rank took no part in the newest checkpoint; rank 0 knows."""
        self.written: dict[str, str] = {}
        """The digest of each object that this rank wrote last."""
        self.trouble = ""
        """Why the newest checkpoint that was tried isn't on record; empty where it is.

        Rank 0 knows it of all ranks.
        """

    def save(
        self,
        metadata: CheckpointMetadata,
        objects: Mapping[str, Any],
        generators: Any | None = None,
    ) -> None:
        """Copy the state and write it in the background; waits for the one before.

        Args:
            metadata: when it is.
            objects: what is tracked, the same on all ranks.
            generators: the state of this rank's random generators; None: as they are now.

        Raises:
            CheckpointError: an object's state couldn't be read back, or see `raise_if_over`.
        """
        self.wait()
        self.raise_if_over()
        self.was_alone = False
        self._rank_store.set(f"begun/{self._writer.rank}", json.dumps(metadata.turn))
        self._staging.begin()
        staged = {
            name: self._staging.copy(objects[name].state_dict()) for name in self._share(objects)
        }
        for name in staged.keys() - self._checked:
            check_loadable(name, staged[name])
            self._checked.add(name)
        staged[rank_name(self._writer.rank)] = (
            capture_generators() if generators is None else generators
        )
        self._failure = None
        self._thread = threading.Thread(
            target=self._write_and_tell,
            args=(metadata, staged),
            name="prefect-torch-ddp-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def has_changed(self, objects: Mapping[str, Any], since: Mapping[str, str]) -> bool:
        """Tell whether something of this rank's share isn't what it was in a checkpoint, by the
        digest of each object.
        """
        self.wait()
        self._staging.begin()
        staged = {
            name: self._staging.copy(objects[name].state_dict()) for name in self._share(objects)
        }
        self._staging.wait()
        return any(
            digest_of(self._serializer.to_view(state)) != since.get(name)
            for name, state in staged.items()
        )

    def wait_for_turn(self, step: int) -> None:
        """Wait, in a step, until the checkpoint before is written; says so where that takes
        long, ever more rarely.
        """
        self.wait(QUIET_S)
        if self.is_writing:
            self._num_long_waits += 1
            if self._num_long_waits.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                logger.warning(WAITS, step, self._num_long_waits)
            self.wait()

    @property
    def is_writing(self) -> bool:
        """Whether something is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written, at most so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def raise_if_over(self) -> None:
        """Raise where the training must not go on: the last commit found a newer attempt, or
        the training is to fail with it.
        """
        if self._on_failure == "fail" or isinstance(self._failure, SupersededError):
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise CheckpointError when the last checkpoint couldn't be written by this rank; it
        names the object and the reason.
        """
        failure = self._failure
        if isinstance(failure, SupersededError):
            raise failure
        if failure is not None:
            msg = (
                f"the last checkpoint of run {self._writer.run_id} could not be written: {failure}"
            )
            raise CheckpointError(msg) from failure

    def clean_up_after(self, manifest: Manifest) -> None:
        """Clean up, on rank 0, where the training's last checkpoint is on record already;
        raises SupersededError.
        """
        try:
            self._committer.clean_up_after(manifest)
        except StorageError as error:
            logger.warning(
                "old checkpoints of run %s are not cleaned up: %s", self._writer.run_id, error
            )

    @property
    def last(self) -> Manifest | None:
        """The newest commit, on rank 0."""
        return self._committer.last

    def _share(self, objects: Mapping[str, Any]) -> list[str]:
        """Return the names that this rank writes.

        Buffers, such as BatchNorm's statistics, are rank 0's in DDP and differ elsewhere until
        the next forward pass: modules that have some are rank 0's to write, or a resumed
        training would go on with others.
        """
        rank, world_size = self._writer.rank, self._writer.world_size
        return [
            name
            for i, (name, item) in enumerate(objects.items())
            if (0 if has_buffers(item) else i % world_size) == rank
        ]

    def _write_and_tell(self, metadata: CheckpointMetadata, staged: dict[str, Any]) -> None:
        note: dict[str, Any] = {"objects": [], "error": None}
        try:
            self._staging.wait()
            written = [self._write(metadata.step, name, state) for name, state in staged.items()]
            self.written = {item.name: item.digest for item in written}
            self._before_commit()
            note["objects"] = [asdict(item) for item in written]
        except Exception as error:  # noqa: BLE001 - the training goes on with the checkpoint before
            self._discard(
                object_key(self._writer.run_id, metadata.step, self._writer.attempt, name)
                for name in staged
            )
            self._fail(metadata, error)
            note["error"] = str(error)
        try:
            if self._writer.rank == 0:
                self._commit(metadata, note)
            else:
                self._rank_store.set(metadata.note_key(self._writer.rank), json.dumps(note))
        except Exception as error:  # noqa: BLE001
            self._fail(metadata, error)

    def _write(self, step: int, name: str, state: Any) -> ManifestObject:
        key = object_key(self._writer.run_id, step, self._writer.attempt, name)
        data = self._serializer.to_view(state)
        try:
            self._writer.storage.write(key, data)
        except StorageError as error:
            msg = f"{key}: {error}"
            raise StorageError(msg) from error
        return ManifestObject(name, key, len(data), digest_of(data))

    def _commit(self, metadata: CheckpointMetadata, own: dict[str, Any]) -> None:
        notes = [
            own,
            *(self._note_of(rank, metadata) for rank in range(1, self._writer.world_size)),
        ]
        if errors := [
            f"rank {rank}: {note['error']}" for rank, note in enumerate(notes) if note["error"]
        ]:
            self._discard(item["key"] for note in notes for item in note["objects"])
            if own["error"]:
                return
            raise CheckpointError(errors[0])
        objects = tuple(ManifestObject(**item) for note in notes for item in note["objects"])
        self._committer.commit(
            Manifest(
                run_id=self._writer.run_id,
                step=metadata.step,
                attempt=self._writer.attempt,
                epoch=metadata.epoch,
                position=metadata.position,
                world_size=self._writer.world_size,
                metrics=metadata.metrics,
                objects=objects,
            )
        )
        self.trouble = ""

    def _note_of(self, rank: int, metadata: CheckpointMetadata) -> dict[str, Any]:
        began_s = time.monotonic()
        turn = metadata.turn

        def is_over() -> bool:
            begun = tuple(json.loads(self._rank_store.get(f"begun/{rank}") or "[]"))
            # It has come further, or to its end, or doesn't come: rank 0 may have been alone in
            # asking for this one.
            has_ended = self._rank_store.get(f"ended/{rank}") is not None and not metadata.is_last
            return begun > turn or (
                begun < turn and (has_ended or time.monotonic() - began_s > ABSENT_S)
            )

        text = wait_for(self._rank_store, metadata.note_key(rank), rank, is_over)
        if text is None:
            self.was_alone = True
            error = "it took no part; ctx.track and ctx.checkpoint belong on every rank, at the same step"
            return {"objects": [], "error": error}
        note: dict[str, Any] = json.loads(text)
        return note

    def _fail(self, metadata: CheckpointMetadata, error: Exception) -> None:
        self._failure = error
        self.trouble = str(error)
        self._committer.look_again()
        if not isinstance(error, SupersededError):
            logger.warning(
                "no checkpoint of step %d, the one before it stays the newest: %s",
                metadata.step,
                error,
            )

    def _discard(self, keys: Iterable[str]) -> None:
        """Give up the room that objects of a checkpoint take which won't be complete; what
        stays is swept by a later commit.
        """
        with suppress(
            StorageError
        ):  # at the first one that fails: a storage that is down takes its time to say so
            for key in keys:
                self._writer.storage.delete(key)
