"""The tracker: when tracked objects are saved, and how they are restored."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from prefect_torch_ddp.checkpoint.attempts import record_end
from prefect_torch_ddp.checkpoint.checkpointer import Checkpointer
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import CheckpointId
from prefect_torch_ddp.checkpoint.manifest import Manifest, checkpoint_ref
from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore, open_rank_store
from prefect_torch_ddp.checkpoint.replicas import Replicas
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.checkpoint.serial import restore_generators
from prefect_torch_ddp.checkpoint.shards import OwnState
from prefect_torch_ddp.checkpoint.whole import refuse_partial
from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.generators import seed_rank
from prefect_torch_ddp.rank.heartbeat import HeartbeatWriter
from prefect_torch_ddp.rank.training import tracked
from prefect_torch_ddp.rank.training.progress import TrainingState, warn_of_missed_save
from prefect_torch_ddp.rank.training.reporter import FAILED_GRACE_S, Reporter
from prefect_torch_ddp.rank.training.saves import Reason, SaveClock, due

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

CHANGED = "changed"


class Tracker:
    """Saves and restores the tracked objects, the random generators and the position.

    The code of a resumed training runs again up to where its checkpoint was made: into a call of
    `steps`, or to a checkpoint behind one. On the way saves do nothing; there, what that code
    changed is restored once more.
    """

    def __init__(
        self,
        config: RankConfig,
        info: RankInfo,
        state: TrainingState,
        reporter: Reporter,
        heartbeat: HeartbeatWriter,
    ) -> None:
        """Make it; the storage is asked for a checkpoint when the first object is tracked."""
        self._config = config
        self._info = info
        self._state = state
        self._reporter = reporter
        self._heartbeat = heartbeat
        self._objects = reporter.tracked
        self._has_begun = False
        self._has_resumed = False
        self._num_passed = 0
        self._num_saves_passed = 0
        self._rank_store: KeyValueStore | None = None
        self._restorer: Restorer | None = None
        run = (config.storage, config.run_id, config.attempt)
        self._clock = SaveClock(config.checkpoint.every_s, time.monotonic())
        self._committer = Committer(*run, config.checkpoint, self._committed)
        self._checkpointer: Checkpointer | None = None
        self._group_sizes: dict[str, list[int]] = {}
        self.wrapped: WeakSet[nn.Module] = WeakSet()
        """The models that were given to `ctx.wrap`: replicas, which have to stay the same."""
        self.take_passes: Callable[[], list[tuple[int, int]]] = list
        """See `Strategy`."""

    def track(self, objects: Mapping[str, Any]) -> None:
        """Take objects, all or none, and restore them where there is a checkpoint."""
        stage = self._config.stage
        tracked.check_trackable(objects, self._objects, stage, has_begun=self._has_begun)
        for name, item in objects.items():
            refuse_partial(name, item)
        self._take({name: tracked.unwrapped(item) for name, item in objects.items()})

    def track_each(self, objects: Mapping[str, Any], *, begins_anew: bool) -> None:
        """Take objects whose state is each rank's own."""
        stage = self._config.stage
        tracked.check_trackable(objects, self._objects, stage, has_begun=self._has_begun)
        info = self._info
        own = (OwnState(each, info.rank, info.world_size, begins_anew) for each in objects.values())
        self._take(dict(zip(objects, own, strict=True)))

    def _take(self, objects: Mapping[str, Any]) -> None:
        with self._heartbeat.during(Phase.RESTORING):
            if self._restorer is None:
                self._restorer = self._open()
            for name, item in objects.items():
                self._restorer.restore(name, item)
                if self._checkpointer is not None:  # not only at the first checkpoint
                    self._checkpointer.check_tracked(name, item)
            tracked.warn_of_groups(self._group_sizes, objects)
            self._objects.update(objects)  # or who catches an error would get it again at the end
            if self._config.trains and self._state.position.in_own_loop:
                self._restore_generators(self._restorer)

    def begin(self) -> None:
        """Take no further objects: `steps` was called."""
        self._has_begun = True
        if self._restorer is None:
            self._set_gone()  # or ranks that track something would wait for this one

    def pass_by(self) -> None:
        """Note that a call of `steps` was over before the checkpoint."""
        self._num_passed += 1

    def resume(self) -> None:
        """Restore the checkpoint's point: generators, and objects that code changed since."""
        # At the end: code behind its last save ran again too.
        if self._has_resumed and not self._state.is_at_end:
            return
        restorer, is_restored = self._restorer if self._config.trains else None, False
        # What an own loop left is none of the steps' business: undisturbed, they would begin
        # with generators of their own too.
        if restorer is not None and not self._state.position.in_own_loop:
            if self._num_passed or self._num_saves_passed or self._has_resumed:
                warn_of_missed_save(self._state, self._num_passed, self._num_saves_passed)
                with self._heartbeat.during(Phase.RESTORING):
                    for name, item in self._objects.items():
                        restorer.restore(name, item)
            is_restored = self._restore_generators(restorer)
        if not is_restored:
            seed_rank(self._config.seed, self._state.step, self._info.rank)
        if restorer is not None:
            restorer.release()
        self._has_resumed, self._state.passes_by = True, False
        self._state.position = self._state.position._replace(in_own_loop=False)
        self._clock.begin(time.monotonic())

    def due(self, asked: Reason | None = None, *, by_clock: bool = False) -> Reason | None:
        """Return why a checkpoint is due, or None.

        Args:
            asked: what the training or all ranks asked for.
            by_clock: also by rank 0's clock, which the other ranks don't know.
        """
        if self._checkpointer is None or self._is_running_again:
            return None
        decides, is_writing = by_clock and self._info.rank == 0, self._checkpointer.is_writing
        pace = self._clock.pace(is_writing=is_writing) if decides else None
        return due(self._config.checkpoint, self._state, time.monotonic(), asked, pace)

    def save_if(self, reason: Reason | None) -> None:
        """Save for a reason, the same on all ranks."""
        if self._checkpointer is None or self._is_running_again:
            return
        self._checkpointer.raise_failure()
        if reason is not None:
            self._save(self._checkpointer)

    def save_outside(self) -> None:
        """Save at once, outside of `steps`, under a number of its own where the step's is taken."""
        if self._checkpointer is None or self._state.stopped_by is not None:
            return  # behind a loop that was stopped from outside that code comes too early
        self._checkpointer.raise_failure()
        if not self._is_running_again:
            self._save(self._checkpointer, is_own=True)
            return
        position = self._state.position
        if self._num_passed > position.loop:
            self._num_saves_passed += 1
            if self._num_saves_passed == position.num_saves_behind:
                self.resume()

    def close(self, *, failed: bool, error: BaseException | None = None) -> None:
        """Write the training's last checkpoint, unless it failed or has it already."""
        if self._checkpointer is not None:
            with self._heartbeat.during(Phase.SAVING):
                if not failed:
                    self._finish(self._checkpointer)
                elif self._checkpointer.is_writing:
                    # The error itself goes home when all is closed, so it is logged here.
                    text = "failed: %r; it waits at most %g s for its checkpoint"
                    logger.error(text, error, FAILED_GRACE_S)
                    self._checkpointer.wait(FAILED_GRACE_S)
        if not failed:  # else the gang ends, and asking a store whose host is gone may take minutes
            self._set_gone()

    @property
    def last(self) -> Manifest | None:
        """The run's newest checkpoint, on rank 0; None where there is none."""
        restorer = self._restorer
        if self._committer.last is not None or self._info.rank != 0 or restorer is None:
            return self._committer.last
        return restorer.manifest if restorer.is_ours else None

    def outcome(self) -> dict[str, Any]:
        """Return the run's checkpoints, on rank 0, and where this attempt resumed from."""
        restored = self._restorer.manifest if self._restorer is not None else None
        top = tracked.best_checkpoint(self._config, self._state) if self._info.rank == 0 else None
        last, best = (
            None if found is None else checkpoint_ref(self._config.storage, found).model_dump()
            for found in (self.last, top)
        )
        step = None if restored is None else restored.step
        return {"last_checkpoint": last, "best_checkpoint": best, "resumed_from_step": step}

    def export(self, workload: str) -> dict[str, str]:
        """Export the models, on rank 0; return their URIs by name."""
        return tracked.export_tracked(self._config, self.last, self._objects, workload)

    def _trouble(self) -> str:
        """Say, on rank 0, since when there has been no checkpoint and why, or nothing."""
        reason = self._checkpointer.trouble if self._checkpointer is not None else ""
        since = "yet" if self.last is None else f"since step {self.last.step}"
        return f"no checkpoint {since}: {reason}" if reason else ""

    @property
    def _must_reach_manifest(self) -> bool:
        """Whether there is a checkpoint of `steps` that this process hasn't come to yet."""
        has_manifest = self._restorer is not None and self._restorer.manifest is not None
        return has_manifest and not (self._has_resumed or self._state.position.in_own_loop)

    @property
    def _is_running_again(self) -> bool:
        """Whether the checkpoint's own attempt has run this code already.

        Another run's checkpoint may also be the beginning of a loop without `steps`.
        """
        is_ours = self._restorer is not None and self._restorer.is_ours
        return self._must_reach_manifest and (is_ours or self._num_passed > 0)

    def _open(self) -> Restorer:
        config, rank = self._config, self._info.rank
        if config.stage == "evaluate":
            at = (config.run_id, config.restore_step, config.restore_attempt)
            restorer = Restorer(config.storage, ResumePoint(config.storage, *at).manifest())
        else:
            store = self._rank_store = self._rank_store or open_rank_store(self._info.world_size)
            own = ResumePoint(config.storage, config.run_id)
            if rank == 0:
                restorer = Restorer.choose(own, config.attempt, config.resume_from, store)
            else:
                restorer = Restorer.follow(own, config.resume_from, store)
            writes = self._committer, self._reporter.flush, self._clock.note
            self._checkpointer = Checkpointer(rank, store, *writes)
            self._checkpointer.resumes = restorer.manifest is not None
            self._state.trouble = self._trouble
        if (manifest := restorer.manifest) is not None:
            self._state.adopt(manifest, is_ours=restorer.is_ours, had_ended=restorer.had_ended)
            self._reporter.restore(manifest)
        return restorer

    def _restore_generators(self, restorer: Restorer) -> bool:
        """Put this rank's random generators back; False where the checkpoint has none for it."""
        state = restorer.generators(self._info.rank)
        if state is not None:
            restore_generators(state)
        return state is not None

    def _set_gone(self) -> None:
        if self._config.trains:
            # RuntimeError: the process group isn't up, or its store went with the rank that had it.
            with suppress(RuntimeError):
                self._rank_store = self._rank_store or open_rank_store(self._info.world_size)
                self._rank_store.set(f"gone/{self._info.rank}", "")

    def _save(
        self, checkpointer: Checkpointer, *, is_own: bool = False, is_last: bool = False
    ) -> None:
        config, state = self._config, self._state
        with self._heartbeat.during(Phase.SAVING):
            if is_own:
                state.count_own_save(is_behind=self._has_begun)
            if not (self._has_begun or self._must_reach_manifest):
                state.position = state.position._replace(in_own_loop=True)
            tracked.warn_of_groups(self._group_sizes, self._objects)
            self._clock.begin(time.monotonic())
            state.saved = state.checkpoint_number
            self._reporter.mark_checkpoint()
            at = (config.run_id, state.saved, config.attempt, state.epoch, state.position._asdict())
            metrics, reports = self._reporter.of_checkpoint()
            manifest = Manifest(*at, self._info.world_size, metrics, reports=reports)
            replicas = Replicas(list(self.wrapped), self.take_passes())
            checkpointer.save(manifest, self._objects, replicas, is_last=is_last)

    def _finish(self, checkpointer: Checkpointer) -> None:
        if self._num_passed and self._is_running_again:
            self.resume()  # behind passed calls nothing was made: what ran again is undone
        checkpointer.wait()
        checkpointer.raise_failure()
        assert self._rank_store is not None
        rank, world_size, store = self._info.rank, self._info.world_size, self._rank_store
        state = self._state
        restored = None if self._restorer is None else self._restorer.manifest
        # Behind a loop that was stopped from outside code comes too early to be saved.
        is_over = state.is_at_end or state.stopped_by is not None
        checks = not is_over and state.saved == state.checkpoint_number
        has_changed = checks and checkpointer.has_changed(self._objects, world_size, restored)
        if rank != 0:
            store.set(f"ended/{rank}", CHANGED if has_changed else "")
        else:
            if checks:
                texts = [store.wait_for(f"ended/{other}", other) for other in range(1, world_size)]
                has_changed |= CHANGED in texts or self._reporter.has_unsaved_best()
            store.set("last", self._number_left(has_changed=has_changed))
        if number := store.wait_for("last", rank=0):
            state.take_number(int(number))
            self._save(checkpointer, is_last=True)
            checkpointer.wait()
            checkpointer.raise_failure(is_last=True)
        checkpointer.say_last()

    def _number_left(self, *, has_changed: bool) -> str:
        """Return, on rank 0, the number of the checkpoint that is still to be made, or nothing."""
        config, state, number = self._config, self._state, self._state.checkpoint_number
        made = self.last if self.last is not None and self.last.step == number else None
        if made is not None and has_changed:
            made, number = None, number + 1
        if self._has_begun and state.stopped_by is None and not state.passes_by:
            attempt = config.attempt if made is None else made.attempt
            with suppress(StorageError):  # all that was trained is there
                record_end(config.storage, config.run_id, CheckpointId(number, attempt))
        if made is None:
            return str(number)
        if not self._committer.is_clean:
            self._committer.clean_up(made, is_last=True)
        return ""

    def _committed(self, manifest: Manifest) -> None:
        pace = self._clock.pace()
        self._reporter.committed(manifest, None if pace is None else pace.every_s)
