"""What rank 0 does with what the ranks wrote of a checkpoint: gather, compare and commit it."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.files import without_doubles
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.checkpoint.rank_save import (
    RankSave,
    mean_metrics,
    refuse_unequal,
    refuse_unshared,
)
from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore, told_by
from prefect_torch_ddp.checkpoint.state.comparison import Comparison
from prefect_torch_ddp.checkpoint.state.replicas import Sketch
from prefect_torch_ddp.errors import (
    CheckpointError,
    InvalidParamsError,
    ReplicasDifferError,
    StorageError,
    SupersededError,
)

FATAL = (SupersededError, InvalidParamsError, ReplicasDifferError)
"""What ends a training whatever `on_failure` says: no later checkpoint would be better."""

logger = logging.getLogger(__name__)


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
        self._unsaid = ""  # the newest checkpoint, if only the log's details show it
        self.trouble = ""
        """Why the newest checkpoint that was tried failed on any rank; or empty."""

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
                text = told_by(self._rank_store, rank, turn, is_last=is_last)
                saves.append(RankSave.from_json(text))
            manifest = self._completed(manifest, saves, sketched)
        except (CheckpointError, InvalidParamsError, StorageError) as error:
            with suppress(StorageError):  # a later commit sweeps what stays
                self._delete(item.key for save in saves for item in save.objects)
            if own.error and not isinstance(error, FATAL):
                return  # which is known already
            raise
        is_notable = self._committer.last is None or bool(self.trouble)
        self._committer.commit(manifest, is_last=is_last)
        self.trouble = ""
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
        refuse_unequal(saves)
        items = (item for save in saves for item in save.objects)
        objects, doubles = without_doubles(items, manifest.folder)
        metrics, intervals = mean_metrics(saves)
        if sketched is not None:
            is_first = not self._resumes and self._committer.last is None
            digests = [save.replicas for save in saves if save.replicas is not None]
            self._comparison.check(sketched, digests, is_first=is_first)
        if manifest.world_size > 1 and self._committer.last is None:
            refuse_unshared(self._storage, manifest, saves)  # it is shared or it isn't
        self._delete(item.key for item in doubles)
        return replace(manifest, metrics=metrics, reports=intervals, objects=objects)

    def _delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._storage.delete(key)


def _cost_of(saves: Sequence[RankSave], began_s: float) -> SaveCost:
    cpu_s: dict[str, float] = defaultdict(float)
    for save in saves:
        cpu_s[save.host] += save.cpu_s
    stall_s = max(save.stall_s for save in saves)
    return SaveCost(stall_s, max(cpu_s.values()), time.monotonic() - began_s)
