"""Writing checkpoints during a training: each rank copies its shards and writes them."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.files import OpenFile, close_all
from prefect_torch_ddp.checkpoint.gather import (
    FATAL,
    Gatherer,
    RankMetric,
    RankMetrics,
    RankSave,
    SaveCost,
)
from prefect_torch_ddp.checkpoint.keys import file_key, object_key
from prefect_torch_ddp.checkpoint.manifest import NOT_REPORTED, Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore, WriteFailure, tell_rank_0
from prefect_torch_ddp.checkpoint.shard import GENERATORS, Shard
from prefect_torch_ddp.checkpoint.state.objects import check_loadable, content_digest
from prefect_torch_ddp.checkpoint.state.own_state import OwnState
from prefect_torch_ddp.checkpoint.state.replicas import (
    NOTHING,
    Replicas,
    Sketch,
    digests_of,
    is_shared_state,
    sketch,
)
from prefect_torch_ddp.checkpoint.state.serial import (
    Serializer,
    Staging,
    capture_generators,
    state_of,
)
from prefect_torch_ddp.checkpoint.state.whole import refuse_sharded, state_alone
from prefect_torch_ddp.errors import (
    CheckpointError,
    StorageError,
)

QUIET_S = 2.0
"""How long a step may wait for the previous checkpoint without a warning."""

logger = logging.getLogger(__name__)


class _Snapshot(NamedTuple):
    """What a rank's thread writes and compares of one save."""

    states: dict[Shard, Any]
    """Those that this rank writes, on the CPU or on their way there."""
    modules: frozenset[Shard]
    tracked: list[str]
    sketched: Sketch | None
    metrics: RankMetrics
    stall_s: float
    files: Sequence[OpenFile] = ()


class Checkpointer:
    """Writes checkpoints of a gang; every rank has one and saves at the same steps.

    The state is copied during the step, and serialised, hashed and written by a thread. There
    is no barrier: each rank tells rank 0 what it wrote, and rank 0 commits.
    """

    def __init__(  # noqa: PLR0913 - a training's rank, its storage, and its listeners
        self,
        rank: int,
        rank_store: KeyValueStore,
        committer: Committer,
        before_commit: Callable[[], None],
        on_cost: Callable[[SaveCost | None], None] = lambda _: None,
        *,
        resumes: bool = False,
    ) -> None:
        """Make one.

        Args:
            rank: this one.
            rank_store: of all ranks.
            committer: used on rank 0.
            before_commit: writes what a run resumed from the checkpoint must not have lost.
            on_cost: on rank 0, takes in what each checkpoint cost, None for one that failed; a
                thread calls it.
            resumes: whether the training continues from a checkpoint, so that its first one isn't
                its own.
        """
        self._rank = rank
        self._rank_store = rank_store
        self._committer = committer
        self._storage = committer.storage
        self._before_commit = before_commit
        self._gatherer = Gatherer(rank_store, committer, on_cost, resumes=resumes)
        self._staging = Staging()
        self._serializer = Serializer()
        self._at_first: dict[str, Mapping[str, str]] = {}  # by object, digests for a comparison
        self._num_saves = 0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._has_warned = False
        self._began_s = 0.0
        self._written: dict[Shard, str] = {}  # the digest of each that this rank wrote last

    def check_tracked(self, name: str, item: Any, world_size: int) -> None:
        """Refuse, by InvalidParamsError, an object whose state couldn't be read back."""
        # All ranks ask here, and only one at a save: what then waits for the others fails now.
        state = state_of(item) if isinstance(item, OwnState) else state_alone(name, item)
        check_loadable(name, state)
        if self._compares(world_size) and is_shared_state(item):
            self._at_first[name] = digests_of(state)

    def save(  # noqa: PLR0913 - what a checkpoint is made of
        self,
        manifest: Manifest,
        objects: Mapping[str, Any],
        shares: Mapping[Shard, Any],
        replicas: Replicas = NOTHING,
        *,
        weights: Mapping[str, int] = MappingProxyType({}),
        is_last: bool = False,
    ) -> None:
        """Copy the state and write it in the background; waits for the previous checkpoint.

        Args:
            manifest: has no objects yet, and this rank's metrics; rank 0's counts.
            objects: what is tracked; all ranks give the same names in one order.
            shares: the shards of them that this rank writes, each with what has its state.
            replicas: what the ranks should have in common.
            weights: what each metric of this rank counts in the mean over the ranks.
            is_last: it may follow another checkpoint of the same step.

        Raises:
            InvalidParamsError: an object's state couldn't be read back.
            CheckpointError: see `raise_failure`.
        """
        self._wait_for_turn(manifest.step)
        self._began_s = time.monotonic()
        turn = 2 * manifest.step + is_last
        self._rank_store.set(f"begun/{self._rank}", str(turn))
        staged = self._stage(shares)
        staged[Shard.of_rank(GENERATORS, self._rank)] = capture_generators()
        sketched = None
        if self._compares(manifest.world_size):
            # After more and more saves: in between they are asked for on the rank that writes only.
            self._num_saves += 1
            asks_states = self._num_saves.bit_count() == 1
            sketched = sketch(objects, replicas, self._at_first, asks_states=asks_states)
            sketched.sums = self._staging.copy(sketched.sums)
        self._failure = None
        modules = (shard for shard, each in shares.items() if isinstance(each, torch.nn.Module))
        kept = frozenset(modules), list(objects), sketched, _of_rank(manifest, weights)
        self._start(manifest, turn, _Snapshot(staged, *kept, time.monotonic() - self._began_s))

    def save_files(
        self,
        manifest: Manifest,
        files: Sequence[OpenFile],
        *,
        weights: Mapping[str, int] = MappingProxyType({}),
        stall_s: float = 0.0,
    ) -> None:
        """Write a folder's files in the background; waits for the previous checkpoint.

        Args:
            manifest: as for `save`.
            files: this rank's; they are closed when they are written.
            weights: as for `save`.
            stall_s: how long the training has waited for them to be made.

        Raises:
            InvalidParamsError: a file of the previous one changed before it was written.
            CheckpointError: see `raise_failure`.
        """
        begins_s = time.monotonic()
        self._wait_for_turn(manifest.step)
        self._began_s = time.monotonic() - stall_s
        self._rank_store.set(f"begun/{self._rank}", str(2 * manifest.step))
        self._failure = None
        stall_s += time.monotonic() - begins_s
        metrics = _of_rank(manifest, weights)
        snapshot = _Snapshot({}, frozenset(), [], None, metrics, stall_s, files)
        self._start(manifest, 2 * manifest.step, snapshot)

    def _wait_for_turn(self, step: int) -> None:
        self._gatherer.is_waited_for.set()
        self.wait(QUIET_S)
        if self.is_writing and not self._has_warned:
            self._has_warned = True
            text = (
                "the training waits in step %d until the previous checkpoint is written: the "
                "storage is slower than they are asked for; ask for fewer, by "
                "checkpoint.every_steps or every_s"
            )
            logger.warning(text, step)
        self.wait()
        self._gatherer.is_waited_for.clear()
        self.raise_failure()

    def _start(self, manifest: Manifest, turn: int, snapshot: _Snapshot) -> None:
        self._thread = threading.Thread(
            target=self._write_share,
            args=(manifest, turn, snapshot),
            name="prefect-torch-ddp-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def has_changed(self, shares: Mapping[Shard, Any], restored: Manifest | None) -> bool:
        """Tell whether this rank's shares differ from what it wrote last, or was restored."""
        self.wait()
        there = () if restored is None else restored.objects
        digests = self._written or {item.shard: item.digest for item in there}
        staged = self._stage(shares)
        self._staging.wait()
        return any(
            content_digest(self._serializer.to_view(state)) != digests.get(shard)
            for shard, state in staged.items()
        )

    @property
    def trouble(self) -> str:
        """On rank 0: why the newest checkpoint that was tried failed on any rank; or empty."""
        return self._gatherer.trouble

    @property
    def is_writing(self) -> bool:
        """Whether something is being written."""
        return self._thread is not None and self._thread.is_alive()

    def say_last(self) -> None:
        """Log the newest checkpoint, on rank 0, unless the log shows it."""
        self._gatherer.say_last()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written, at most so long."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def raise_failure(self, *, is_last: bool = False) -> None:
        """Raise what the last write on this rank failed with, if that ends the training.

        It does if it is `FATAL`, `on_failure` is "fail", or no other write follows: `is_last`.
        """
        error = self._failure
        if isinstance(error, FATAL):
            raise error
        if error is not None and (is_last or self._committer.policy.on_failure == "fail"):
            checkpoint = f"the last checkpoint of run {self._committer.run_id}"
            msg = f"{checkpoint} could not be written: {error}"
            raise CheckpointError(msg) from error

    def _compares(self, world_size: int) -> bool:
        return world_size > 1 and self._committer.policy.compare_replicas

    def _stage(self, shares: Mapping[Shard, Any]) -> dict[Shard, Any]:
        """Copy the states that this rank writes; all of them are asked for before that."""
        self._staging.begin()
        states = {shard: _state_to_write(shard.object, item) for shard, item in shares.items()}
        return {shard: self._staging.copy(state) for shard, state in states.items()}

    def _write_share(self, manifest: Manifest, turn: int, snapshot: _Snapshot) -> None:
        host, stall_s = socket.gethostname(), snapshot.stall_s
        save = RankSave(host, snapshot.tracked, snapshot.metrics, stall_s)
        try:
            self._staging.wait()
            if snapshot.sketched is not None:
                save.replicas = snapshot.sketched.digests()
            digests = {}
            for shard, state in snapshot.states.items():
                is_module = shard in snapshot.modules
                found = self._write(manifest, shard, state, is_module=is_module)
                save.objects.append(found)
                digests[shard] = found.digest
            for number, file in enumerate(snapshot.files):
                save.objects.append(self._write_file(manifest, number, file))
            self._written = digests
            self._before_commit()
        except Exception as error:  # noqa: BLE001 - the training continues from the one before
            self._fail(manifest, error)
            save.error = WriteFailure.of(error)
        finally:
            close_all(snapshot.files)
        try:
            save.cpu_s = time.thread_time()  # the thread began with this save
            if self._rank == 0:
                sketched, began_s = snapshot.sketched, self._began_s
                self._gatherer.commit(manifest, turn, save, sketched, began_s)
            else:
                tell_rank_0(self._rank_store, self._rank, turn, save.to_json())
        except Exception as error:  # noqa: BLE001
            self._fail(manifest, error)

    def _write(
        self, manifest: Manifest, shard: Shard, state: Any, *, is_module: bool
    ) -> ManifestObject:
        key = object_key(manifest.run_id, manifest.step, manifest.attempt, shard.name)
        data = self._serializer.to_view(state)
        self._put(key, data)
        which, digest = shard._asdict(), content_digest(data)
        return ManifestObject(
            key=key, num_bytes=len(data), digest=digest, is_module=is_module, **which
        )

    def _write_file(self, manifest: Manifest, number: int, file: OpenFile) -> ManifestObject:
        key = file_key(manifest.run_id, manifest.step, manifest.attempt, self._rank, number)
        data = file.read()
        self._put(key, data)
        digest = content_digest(data)
        return ManifestObject(file.path, key, len(data), digest, rank=self._rank, path=file.path)

    def _put(self, key: str, data: bytes | memoryview) -> None:
        try:
            self._storage.write(key, data)
        except StorageError as error:
            msg = f"{key}: {error}"
            raise StorageError(msg) from error

    def _fail(self, manifest: Manifest, error: Exception) -> None:
        self._failure = error
        self._gatherer.note_failure(manifest.step, error)


def _state_to_write(name: str, item: Any) -> Any:
    """Return a state; InvalidParamsError: it couldn't be read back."""
    state = state_alone(name, item) if is_shared_state(item) else state_of(item)
    refuse_sharded(name, state)
    check_loadable(name, state)  # each time: it may hold other types by now
    return state


def _of_rank(manifest: Manifest, weights: Mapping[str, int]) -> RankMetrics:
    """Return this rank's metrics, which its manifest has, for the mean over the ranks."""
    return {
        name: RankMetric(value, manifest.reports.get(name, NOT_REPORTED), weights.get(name, 0))
        for name, value in manifest.metrics.items()
    }
