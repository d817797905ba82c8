"""Writing checkpoints during a training: each rank writes its share, and rank 0 commits."""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import object_key, rank_name
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.objects import digest_of
from prefect_torch_ddp.checkpoint.rank_store import (
    KeyValueStore,
    Turn,
    set_begun,
    set_report,
    wait_for_report,
)
from prefect_torch_ddp.checkpoint.reports import check_reports, refuse_unshared
from prefect_torch_ddp.checkpoint.serial import (
    Serializer,
    Staging,
    capture_generators,
    check_loadable,
    has_buffers,
)
from prefect_torch_ddp.errors import (
    CheckpointError,
    InvalidParamsError,
    StorageError,
    SupersededError,
)
from prefect_torch_ddp.storage.protocol import Storage

FATAL = (SupersededError, InvalidParamsError)
"""What ends a training whatever `on_failure` says: no later checkpoint would be better."""
QUIET_S = 2.0
"""How long a step may wait for the previous checkpoint without a warning."""

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
    """Its number: the optimizer steps, plus the checkpoints made outside of `steps`."""
    epoch: int
    position: Mapping[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest values; those of rank 0 count."""
    is_last: bool = False
    """Whether the training ends with it; it may follow another one of the same step."""
    num_steps: int = 0
    """Optimizer steps alone: equal numbers of ranks are different checkpoints where one of them
    left out a checkpoint outside of `steps`."""

    @property
    def turn(self) -> Turn:
        """Which checkpoint it is, to the ranks."""
        return 2 * self.step + self.is_last, self.num_steps


class Checkpointer:
    """Writes checkpoints of a gang; every rank has one and saves at the same steps.

    The state is copied during the step, and serialised, hashed and written by a thread. There
    is no barrier: each rank reports to rank 0 what it wrote, and rank 0 commits.
    """

    def __init__(
        self,
        writer: Writer,
        rank_store: KeyValueStore,
        committer: Committer,
        before_commit: Callable[[], None],
        on_failure: Literal["warn", "fail"] = "warn",
    ) -> None:
        """`before_commit` writes what a run resumed from the checkpoint must not have lost."""
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
        """On rank 0: whether another rank took no part in the newest checkpoint."""
        self.written: dict[str, str] = {}
        """The digest of each object that this rank wrote last."""
        self.trouble = ""
        """On rank 0: why the newest checkpoint that was tried failed on any rank; or empty."""

    def save(
        self,
        metadata: CheckpointMetadata,
        objects: Mapping[str, Any],
        generators: Any | None = None,
    ) -> None:
        """Copy the state and write it in the background; waits for the previous checkpoint.

        All ranks give the same objects, in one order. This rank's random generators are saved
        as they are now, or as given.

        Raises:
            InvalidParamsError: an object's state couldn't be read back.
            CheckpointError: see `raise_if_over`.
        """
        self.wait()
        self.raise_if_over()
        self.was_alone = False
        set_begun(self._rank_store, self._writer.rank, metadata.turn)
        staged = self._stage(objects)
        for name in staged.keys() - self._checked:
            check_loadable(name, staged[name])
            self._checked.add(name)
        own = capture_generators() if generators is None else generators
        staged[rank_name(self._writer.rank)] = own
        self._failure = None
        self._thread = threading.Thread(
            target=self._write_share,
            args=(metadata, staged, list(objects)),
            name="prefect-torch-ddp-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def has_changed(self, objects: Mapping[str, Any], since: Mapping[str, str]) -> bool:
        """Tell whether this rank's share differs from a checkpoint, by its objects' digests."""
        self.wait()
        staged = self._stage(objects)
        self._staging.wait()
        return any(
            digest_of(self._serializer.to_view(state)) != since.get(name)
            for name, state in staged.items()
        )

    def wait_for_turn(self, step: int) -> None:
        """Wait, in a step, for the previous checkpoint; warn where that takes long, ever rarer."""
        self.wait(QUIET_S)
        if self.is_writing:
            self._num_long_waits += 1
            if self._num_long_waits.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                text = (
                    "the training waits in step %d until the previous checkpoint is written (long "
                    "wait number %d): the storage is slower than they are asked for; ask for "
                    "fewer, by checkpoint.every_steps or every_s"
                )
                logger.warning(text, step, self._num_long_waits)
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
        """Raise where the training must end: by what is `FATAL`, or `on_failure` is "fail"."""
        if self._on_failure == "fail" or isinstance(self._failure, FATAL):
            self.raise_failure()

    def raise_failure(self) -> None:
        """Raise CheckpointError, with object and reason, if this rank's last write failed."""
        if isinstance(self._failure, FATAL):
            raise self._failure
        if self._failure is not None:
            checkpoint = f"the last checkpoint of run {self._writer.run_id}"
            msg = f"{checkpoint} could not be written: {self._failure}"
            raise CheckpointError(msg) from self._failure

    def clean_up_after(self, manifest: Manifest) -> None:
        """Clean up, on rank 0, where an older attempt committed the training's last checkpoint.

        Raises:
            SupersededError: a newer attempt has begun.
        """
        self._committer.clean_up(manifest)

    @property
    def last(self) -> Manifest | None:
        """The newest commit, on rank 0."""
        return self._committer.last

    def _stage(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the states that this rank writes."""
        rank, world_size = self._writer.rank, self._writer.world_size
        self._staging.begin()
        # In DDP buffers, such as BatchNorm's statistics, are rank 0's until the next forward
        # pass: written by another rank, a resumed training would continue with others.
        return {
            name: self._staging.copy(item.state_dict())
            for i, (name, item) in enumerate(objects.items())
            if (0 if has_buffers(item) else i % world_size) == rank
        }

    def _write_share(
        self, metadata: CheckpointMetadata, staged: dict[str, Any], tracked: list[str]
    ) -> None:
        report: dict[str, Any] = {"tracked": tracked, "objects": [], "error": None}
        report["host"] = socket.gethostname()
        try:
            self._staging.wait()
            written = [self._write(metadata.step, name, state) for name, state in staged.items()]
            self.written = {item.name: item.digest for item in written}
            self._before_commit()
            report["objects"] = [asdict(item) for item in written]
        except Exception as error:  # noqa: BLE001 - the training continues from the one before
            self._discard(self._key(metadata.step, name) for name in staged)
            self._fail(metadata, error)
            report["error"] = str(error)
        try:
            if self._writer.rank == 0:
                self._commit(metadata, report)
            else:
                set_report(self._rank_store, self._writer.rank, metadata.turn, report)
        except Exception as error:  # noqa: BLE001
            self._fail(metadata, error)

    def _key(self, step: int, name: str) -> str:
        return object_key(self._writer.run_id, step, self._writer.attempt, name)

    def _write(self, step: int, name: str, state: Any) -> ManifestObject:
        key, data = self._key(step, name), self._serializer.to_view(state)
        try:
            self._writer.storage.write(key, data)
        except StorageError as error:
            msg = f"{key}: {error}"
            raise StorageError(msg) from error
        return ManifestObject(name, key, len(data), digest_of(data))

    def _commit(self, metadata: CheckpointMetadata, own: dict[str, Any]) -> None:
        writer = self._writer
        others = range(1, writer.world_size)
        reports = [own, *(self._report_of(rank, metadata) for rank in others)]
        written = [ManifestObject(**item) for report in reports for item in report["objects"]]
        manifest = Manifest(
            run_id=writer.run_id,
            step=metadata.step,
            attempt=writer.attempt,
            epoch=metadata.epoch,
            position=metadata.position,
            world_size=writer.world_size,
            metrics=metadata.metrics,
            objects=tuple(written),
        )
        try:
            check_reports(reports)
            if others and self._committer.last is None:  # a storage is shared or it isn't
                refuse_unshared(writer.storage, manifest, reports)
        except (CheckpointError, InvalidParamsError, StorageError) as error:
            self._discard(item.key for item in written)
            if own["error"] and not isinstance(error, FATAL):
                return  # which is known already
            raise
        self._committer.commit(manifest)
        self.trouble = ""

    def _report_of(self, rank: int, metadata: CheckpointMetadata) -> dict[str, Any]:
        report = wait_for_report(self._rank_store, rank, metadata.turn, is_last=metadata.is_last)
        if report is not None:
            return report
        self.was_alone = True
        error = (
            "it took no part; ctx.track and ctx.checkpoint belong on every rank, at the same step"
        )
        return {"objects": [], "error": error}

    def _fail(self, metadata: CheckpointMetadata, error: Exception) -> None:
        self._failure = error
        self.trouble = str(error)
        self._committer.look_again()
        if not isinstance(error, SupersededError):
            text = "no checkpoint of step %d, the one before it stays the newest: %s"
            logger.warning(text, metadata.step, error)

    def _discard(self, keys: Iterable[str]) -> None:
        """Delete objects of a checkpoint that failed; a later commit sweeps what stays."""
        # Up to the first that fails: a storage that is down takes its time to say so.
        with suppress(StorageError):
            for key in keys:
                self._writer.storage.delete(key)
