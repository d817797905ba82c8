"""What each rank wrote of a checkpoint, and what rank 0 does with it: gather, compare, commit."""

import json
import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, cast

from prefect_torch_ddp.checkpoint.attempts import LOOK_S, refuse_superseded
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.files import without_doubles
from prefect_torch_ddp.checkpoint.keys import checkpoint_prefix
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject, Reported
from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore, WriteFailure, told_by
from prefect_torch_ddp.checkpoint.shard import uncovered
from prefect_torch_ddp.checkpoint.state.comparison import Comparison
from prefect_torch_ddp.checkpoint.state.replicas import Digests, Sketch
from prefect_torch_ddp.errors import (
    CheckpointError,
    InvalidParamsError,
    ReplicasDifferError,
    StorageError,
    SupersededError,
)
from prefect_torch_ddp.storage.protocol import Storage

FATAL = (SupersededError, InvalidParamsError, ReplicasDifferError)
"""What ends a training whatever `on_failure` says: no later checkpoint would be better."""


class RankMetric(NamedTuple):
    """A rank's newest value of a metric."""

    value: float
    reported: Reported
    weight: int
    """In the mean over the ranks: the samples of that step, or 0."""


RankMetrics = Mapping[str, RankMetric]

logger = logging.getLogger(__name__)


@dataclass
class RankSave:
    """What one rank tells rank 0 of a checkpoint."""

    host: str
    tracked: list[str]
    """The names of its tracked objects, in the order in which they are shared out."""
    metrics: RankMetrics
    stall_s: float
    """How long the step waited."""
    cpu_s: float = 0.0
    """CPU time of the thread that wrote."""
    objects: list[ManifestObject] = field(default_factory=list)
    """What it wrote."""
    error: WriteFailure | None = None
    replicas: Digests | None = None
    """What tells whether all ranks hold the same, if that is compared."""

    def to_json(self) -> str:
        """Return it as a text for the rank store."""
        return json.dumps({**vars(self), "objects": [item.as_stored() for item in self.objects]})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` of another rank of this attempt returned."""
        values: dict[str, Any] = json.loads(text)
        objects = [ManifestObject.from_stored(item) for item in values.pop("objects")]
        metrics = {
            name: RankMetric(value, Reported(*reported), weight)
            for name, (value, reported, weight) in values.pop("metrics").items()
        }
        error = values.pop("error")
        error = None if error is None else WriteFailure(*error)
        return cls(**values, error=error, metrics=metrics, objects=objects)


@dataclass(frozen=True)
class SaveCost:
    """What one checkpoint cost, as rank 0 knows it from all ranks."""

    stall_s: float
    """How long the step waited, on the rank where that was longest."""
    cpu_s: float
    """CPU time of the writing threads, on the host whose ranks took most: as if nothing else
    could run there meanwhile."""
    written_s: float
    """From its begin until it is complete and superfluous ones are deleted."""


class Gatherer:
    """Completes a training's checkpoints, in the thread of rank 0 that wrote its shards."""

    def __init__(
        self,
        rank_store: KeyValueStore,
        committer: Committer,
        on_cost: Callable[[SaveCost | None], None],
        *,
        resumes: bool,
    ) -> None:
        """Make one; the arguments are those of a `Checkpointer`."""
        self._rank_store = rank_store
        self._committer = committer
        self._storage = committer.storage
        self._on_cost = on_cost
        self._resumes = resumes
        self._comparison = Comparison()
        self._num_unwritten = 0  # checkpoints in a row that a rank couldn't write
        self._unsaid = ""  # the newest checkpoint, if only the log's details show it
        self.trouble = ""
        """Why the newest checkpoint that was tried failed on any rank; or empty."""
        self.is_waited_for = threading.Event()
        """Set while the training waits for a checkpoint to be written, before it makes the next."""

    def commit(
        self,
        manifest: Manifest,
        turn: int,
        own: RankSave,
        sketched: Sketch | None,
        began_s: float,
    ) -> None:
        """Wait for the other ranks, and commit the checkpoint if all of it is there.

        Args:
            manifest: has no objects yet.
            turn: of the save; see `told_by`.
            own: what rank 0 wrote.
            sketched: of rank 0, if replicas are compared.
            began_s: when the save began, by the monotonic clock.

        Raises:
            CheckpointError: another rank failed. Nothing is committed, as with the next errors.
            InvalidParamsError: the ranks' shards don't make the objects, or the states differ.
            ReplicasDifferError: the replicas differ.
            SupersededError: a newer attempt has begun, perhaps right after the commit.
            StorageError: the storage failed.
        """
        saves, is_last = [own], bool(turn % 2)
        try:
            for rank in range(1, manifest.world_size):
                is_waited_for = self.is_waited_for.is_set
                text = told_by(
                    self._rank_store, rank, turn, is_last=is_last, is_waited_for=is_waited_for
                )
                saves.append(RankSave.from_json(text))
            manifest = self._completed(manifest, saves, sketched)
        except (CheckpointError, InvalidParamsError, StorageError) as error:
            with suppress(StorageError):  # a later commit sweeps what stays
                self._delete(item.key for save in saves for item in save.objects)
            self._make_room(manifest.step, saves, is_last=is_last)
            if own.error and not isinstance(error, FATAL):
                return  # which is known already
            raise
        is_notable = self._committer.last is None or bool(self.trouble)
        self._committer.commit(manifest, is_last=is_last)
        self.trouble, self._num_unwritten = "", 0
        own.cpu_s = time.thread_time()  # with the commit
        self._on_cost(_cost_of(saves, began_s))
        size_mb = sum(item.num_bytes for item in manifest.objects) / 1e6
        took_ms = (time.monotonic() - began_s) * 1000
        text = f"checkpoint at step {manifest.step} ({size_mb:,.1f} MB, {took_ms:,.0f} ms)"
        # Of all those in between, people want the first, the last, and the one after a failure.
        logger.log(logging.INFO if is_notable else logging.DEBUG, text)
        self._unsaid = "" if is_notable else text

    def note_failure(self, step: int, error: Exception) -> None:
        """Note that a step has no checkpoint, and log why unless a newer attempt has begun."""
        self.trouble = str(error)
        self._on_cost(None)
        self._committer.look_again()
        if not isinstance(error, SupersededError):
            text = "no checkpoint of step %d, the one before it stays the newest: %s"
            logger.warning(text, step, error)

    def say_last(self) -> None:
        """Log the newest checkpoint, unless the log shows it."""
        if self._unsaid:
            logger.info(self._unsaid)

    def _completed(
        self, manifest: Manifest, saves: Sequence[RankSave], sketched: Sketch | None
    ) -> Manifest:
        """Return the manifest with everything that the ranks wrote, which is compared first."""
        _refuse_unequal(saves)
        items = (item for save in saves for item in save.objects)
        objects, doubles = without_doubles(items, manifest.folder)
        metrics, reports = _mean_metrics(saves)
        if sketched is not None:
            is_first = not self._resumes and self._committer.last is None
            # A rank without its digests fails the save; leaving it out would compare nothing.
            digests = [cast("Digests", save.replicas) for save in saves]
            self._comparison.check(sketched, digests, is_first=is_first)
        if manifest.world_size > 1 and self._committer.last is None:
            _refuse_unshared(self._storage, manifest, saves)  # it is shared or it isn't
        self._delete(item.key for item in doubles)
        return replace(manifest, metrics=metrics, reports=reports, objects=objects)

    def _make_room(self, step: int, saves: Sequence[RankSave], *, is_last: bool) -> None:
        """Make room for the next checkpoint if this one may have failed for want of it.

        A failure that doesn't say so is mostly a storage that is away for a moment; if the next
        checkpoint fails too, it may be a full bucket.
        """
        errors = [save.error for save in saves if save.error is not None]
        self._num_unwritten += bool(errors)
        is_full = any(error.is_full for error in errors) or self._num_unwritten > 1
        if errors and is_full and not is_last:
            self._committer.make_room(step)
            self._committer.look_again()

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._storage.delete(key)


def _cost_of(saves: Sequence[RankSave], began_s: float) -> SaveCost:
    cpu_s: dict[str, float] = defaultdict(float)
    for save in saves:
        cpu_s[save.host] += save.cpu_s
    stall_s = max(save.stall_s for save in saves)
    return SaveCost(stall_s, max(cpu_s.values()), time.monotonic() - began_s)


def _refuse_unequal(saves: Sequence[RankSave]) -> None:
    """Refuse different objects by InvalidParamsError, and a rank that failed by CheckpointError."""
    # The objects are shared out by their order.
    names = saves[0].tracked
    for rank, save in enumerate(saves):
        if save.tracked != names:
            msg = (
                f"the ranks track different objects: rank 0 {', '.join(names)}; rank {rank} "
                f"{', '.join(save.tracked)}; call ctx.track with the same names in one order "
                "on every rank, also for what only rank 0 uses, such as averaged weights"
            )
            raise InvalidParamsError(msg)
        if save.error:
            msg = f"rank {rank}: {save.error.text}"
            raise CheckpointError(msg)
    # Of a folder's files several ranks may commit the same one.
    shards = (item.shard for save in saves for item in save.objects if item.path is None)
    if found := uncovered(names, shards, len(saves)):
        name, fault = found
        msg = (
            f"the tracked object {name!r} differs between the ranks ({fault}): it has buffers on "
            "some of them only, or ctx.track on some and ctx.track_each on others; build and track "
            "it the same way on every rank"
        )
        raise InvalidParamsError(msg)


def _mean_metrics(
    saves: Sequence[RankSave],
) -> tuple[dict[str, float], dict[str, Reported]]:
    """Return each metric's mean over the ranks that reported it last, and when that was.

    By samples, if some are known; otherwise each rank counts the same, as `read_metrics` has it.
    """
    values: dict[str, float] = {}
    reports: dict[str, Reported] = {}
    for name in dict.fromkeys(name for save in saves for name in save.metrics):
        found = [save.metrics[name] for save in saves if name in save.metrics]
        last = reports[name] = max(each.reported for each in found)
        of_last = [(each.value, each.weight) for each in found if each.reported == last]
        if not any(weight for _, weight in of_last):
            of_last = [(value, 1) for value, _ in of_last]
        terms = [(value, weight) for value, weight in of_last if weight]
        if len({value for value, _ in terms}) == 1:
            values[name] = terms[0][0]  # not another one by a rounding
        else:
            total = sum(weight for _, weight in terms)
            values[name] = sum(value * weight for value, weight in terms) / total
    return values, reports


def _refuse_unshared(storage: Storage, manifest: Manifest, saves: Sequence[RankSave]) -> None:
    """Raise InvalidParamsError if rank 0 doesn't find what other ranks wrote, by name and size.

    Or SupersededError: a newer attempt has begun, which deletes what this one wrote.
    """
    prefix = checkpoint_prefix(manifest.run_id, manifest.step, manifest.attempt)
    ends_at = time.monotonic() + LOOK_S
    while True:
        there = {(found.key, found.num_bytes) for found in storage.list(prefix)}
        lacking = [
            f"rank {rank} on {save.host}"
            for rank, save in enumerate(saves)
            if {(item.key, item.num_bytes) for item in save.objects} - there
        ]
        if not lacking:
            return
        refuse_superseded(storage, manifest.run_id, manifest.attempt)
        if time.monotonic() > ends_at:
            msg = (
                f"the hosts don't share the storage {storage.uri}: rank 0 on "
                f"{socket.gethostname()} doesn't find there what was written by "
                f"{', '.join(lacking[:8])}{', ...' if lacking[8:] else ''}; use a folder that all "
                "hosts mount under this path, or s3://bucket/prefix"
            )
            raise InvalidParamsError(msg)
        threading.Event().wait(LOOK_S / 30)
