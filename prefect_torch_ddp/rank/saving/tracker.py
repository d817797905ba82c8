"""The tracker: when tracked objects are saved, and how they are restored."""

import logging
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from prefect_torch_ddp.checkpoint.checkpointer import Checkpointer, CheckpointMetadata, Writer
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.rank_store import (
    KeyValueStore,
    open_rank_store,
    set_gone,
    wait_for,
)
from prefect_torch_ddp.checkpoint.restore import Restorer, keeps_its_state
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.checkpoint.serial import check_loadable
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.generators import seed_rank
from prefect_torch_ddp.rank.heartbeat import HeartbeatWriter
from prefect_torch_ddp.rank.saving.checkpoint_status import CheckpointStatus
from prefect_torch_ddp.rank.saving.reporter import FAILED_GRACE_S, Reporter
from prefect_torch_ddp.rank.saving.state import Position, TrainingState
from prefect_torch_ddp.rank.saving.tracked import check_trackable, unwrapped

logger = logging.getLogger(__name__)

CHANGED = "changed"
QUIET_S = 0.5
"""How long a rank that failed writes its checkpoint before it logs its error."""


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
        self._objects: dict[str, Any] = {}
        self.checkpoint_status = CheckpointStatus(config, info, self._objects)
        self._has_begun = False
        self._has_resumed = False
        self._num_passed = 0
        self._num_saves_passed = 0
        self._rank_store: KeyValueStore | None = None
        self._restorer: Restorer | None = None
        self._checkpointer: Checkpointer | None = None
        self._is_own_save = False
        """Whether the newest checkpoint was made outside of `steps`, which don't tell then
        whether anything has changed."""
        self._saved_at = time.monotonic()

    def track(self, objects: Mapping[str, Any]) -> None:
        """Take objects, all or none, and restore them where there is a checkpoint."""
        check_trackable(objects, self._objects, self._config.stage, has_begun=self._has_begun)
        with self._heartbeat.during(Phase.RESTORING):
            if self._restorer is None:
                kept = {name for name, item in objects.items() if keeps_its_state(unwrapped(item))}
                self._restorer = self._open(kept)
            bare = {name: unwrapped(item) for name, item in objects.items()}
            for name, item in bare.items():
                self._restorer.restore(name, item)
                if self._checkpointer is not None:  # not only at the first checkpoint
                    check_loadable(name, item.state_dict())
            self._objects.update(bare)  # or who catches an error would get it again at the end
            if self._config.trains and self._state.position.in_own_loop:
                self._restorer.restore_generators(self._info.rank)

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
        if self._has_resumed:
            return
        restorer = self._restorer if self._config.trains else None
        is_restored = False
        # What an own loop left is none of the steps' business: undisturbed, they would begin
        # with generators of their own too.
        if restorer is not None and not self._state.position.in_own_loop:
            if self._num_passed or self._num_saves_passed:
                with self._heartbeat.during(Phase.RESTORING):
                    for name, item in self._objects.items():
                        restorer.restore(name, item)
            is_restored = restorer.restore_generators(self._info.rank)
        if not is_restored:
            seed_rank(self._config.seed, self._state.step, self._info.rank)
        if restorer is not None:
            restorer.release()
        self._has_resumed = True
        self._state.position = replace(self._state.position, in_own_loop=False)
        self._saved_at = time.monotonic()

    def is_due_by_time(self) -> bool:
        """Tell whether so many seconds have passed; rank 0's clock decides for all."""
        every_s = self._config.checkpoint.every_s
        if every_s is None or self._checkpointer is None or self._info.rank != 0:
            return False
        return time.monotonic() - self._saved_at >= every_s

    def save_if(self, *, forced: bool, by_time: bool = False) -> None:
        """Save if there is a reason, the same on all ranks, and this step isn't saved yet."""
        if self._checkpointer is None or self._is_running_again:
            return
        self._checkpointer.raise_if_over()
        every_steps, step = self._config.checkpoint.every_steps, self._state.step
        by_steps = every_steps is not None and step > 0 and step % every_steps == 0
        if (forced or by_time or by_steps) and self._state.saved != self._state.checkpoint_number:
            self._save(self._checkpointer)

    def save_outside(self) -> None:
        """Save at once, outside of `steps`, under a number of its own where the step's is taken."""
        if self._checkpointer is None or self._state.stopped_by is not None:
            return  # behind a loop that was stopped from outside that code comes too early
        self._checkpointer.raise_if_over()
        if not self._is_running_again:
            self._save(self._checkpointer, is_own=True)
            return
        position = self._state.position
        if self._num_passed > position.loop:
            self._num_saves_passed += 1
            if self._num_saves_passed == position.num_saves_behind:
                self.resume()

    def close(self, *, failed: bool, error: BaseException | None = None) -> None:
        """Write the training's last checkpoint, unless it failed or has it already.

        Raises:
            CheckpointError: it can't be written.
        """
        if self._checkpointer is not None:
            with self._heartbeat.during(Phase.SAVING):
                if failed:
                    self._wait_a_little(self._checkpointer, error)
                else:
                    self._finish(self._checkpointer)
        if not failed:  # else the gang ends, and asking a store whose host is gone may take minutes
            self._set_gone()

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
        assert self._restorer is not None
        return self._must_reach_manifest and (self._restorer.is_ours or self._num_passed > 0)

    def _wait_a_little(self, checkpointer: Checkpointer, error: BaseException | None) -> None:
        # The error itself goes home when all is closed, so it is logged here.
        checkpointer.wait(QUIET_S)
        if checkpointer.is_writing:
            what = f"{type(error).__name__}: {error}"
            wait = f"it waits at most {FAILED_GRACE_S:g} s for its checkpoint that is being written"
            logger.error("rank %d failed: %s; %s", self._info.rank, what, wait)
            checkpointer.wait(FAILED_GRACE_S - QUIET_S)

    def _open(self, kept: Collection[str]) -> Restorer:
        config = self._config
        if config.stage == "evaluate":
            at = (config.restore_step, config.restore_attempt)
            restorer = Restorer.at_step(config.storage, config.run_id, *at)
        else:
            self._rank_store = self._rank_store or open_rank_store(self._info.world_size)
            own = ResumePoint(config.storage, config.run_id)
            if self._info.rank == 0:
                restorer = Restorer.choose(
                    own, config.attempt, config.resume_from, self._rank_store, kept
                )
            else:
                restorer = Restorer.follow(own, config.resume_from, self._rank_store)
            self._checkpointer = self._make_checkpointer(self._rank_store)
            self._state.trouble = self.checkpoint_status.trouble
        self.checkpoint_status.begin(restorer, self._checkpointer)
        if (manifest := restorer.manifest) is not None:
            position = Position.from_json(manifest.position)
            self._state.adopt(manifest.step, manifest.epoch, position, is_ours=restorer.is_ours)
            self._is_own_save = restorer.is_ours and position.is_outside
            self._reporter.restore(manifest.metrics)
        return restorer

    def _set_gone(self) -> None:
        if self._config.trains:
            # RuntimeError: the process group isn't up, or its store went with the rank that had it.
            with suppress(RuntimeError):
                self._rank_store = self._rank_store or open_rank_store(self._info.world_size)
                set_gone(self._rank_store, self._info.rank)

    def _make_checkpointer(self, rank_store: KeyValueStore) -> Checkpointer:
        config, info = self._config, self._info
        run = (config.storage, config.run_id, config.attempt)
        writer, committer = (
            Writer(*run, info.rank, info.world_size),
            Committer(*run, config.checkpoint),
        )
        flush, on_failure = self._reporter.flush, config.checkpoint.on_failure
        return Checkpointer(writer, rank_store, committer, flush, on_failure)

    def _save(
        self, checkpointer: Checkpointer, *, is_own: bool = False, is_last: bool = False
    ) -> None:
        state = self._state
        with self._heartbeat.during(Phase.SAVING):
            checkpointer.wait_for_turn(state.step)
            if self._is_own_save and checkpointer.was_alone:
                state.uncount_own_save()  # the other ranks didn't count that one
            if is_own:
                state.count_own_save(is_behind=self._has_begun)
            if not (self._has_begun or self._must_reach_manifest):
                state.position = replace(state.position, in_own_loop=True)
            self._is_own_save = is_own
            self._saved_at = time.monotonic()
            state.saved = number = state.checkpoint_number
            metadata = CheckpointMetadata(
                number,
                state.epoch,
                state.position.as_json(),
                self._reporter.newest(),
                is_last,
                state.step,
            )
            to_come = None
            if self._must_reach_manifest and self._restorer is not None:
                to_come = self._restorer.read_generators(self._info.rank)
            checkpointer.save(metadata, self._objects, to_come)

    def _finish(self, checkpointer: Checkpointer) -> None:
        checkpointer.wait()
        checkpointer.raise_if_over()
        assert self._rank_store is not None
        checks = self._is_own_save or self._is_running_again
        has_changed = checks and self._has_changed(checkpointer)
        if self._info.rank != 0:
            self._rank_store.set(f"ended/{self._info.rank}", CHANGED if has_changed else "")
        else:
            others = range(1, self._info.world_size) if checks and not has_changed else ()
            for rank in others:
                text = wait_for(self._rank_store, f"ended/{rank}", rank)
                has_changed = has_changed or text == CHANGED
            self._rank_store.set("last", self._number_left(checkpointer, has_changed=has_changed))
        number = wait_for(self._rank_store, "last", rank=0)
        if number:
            self._is_own_save = False
            self._state.take_number(int(number))
            self._save(checkpointer, is_last=True)
            checkpointer.wait()
            checkpointer.raise_failure()

    def _has_changed(self, checkpointer: Checkpointer) -> bool:
        """Tell whether this rank has to save changes since a checkpoint outside of `steps`."""
        if self._state.stopped_by is not None:
            return False
        manifest = self._restorer.manifest if self._restorer is not None else None
        restored = {} if manifest is None else {item.name: item.digest for item in manifest.objects}
        return checkpointer.has_changed(self._objects, checkpointer.written or restored)

    def _number_left(self, checkpointer: Checkpointer, *, has_changed: bool) -> str:
        """Return, on rank 0, the number of the checkpoint that is still to be made, or nothing."""
        newest, number = self.checkpoint_status.last, self._state.checkpoint_number
        if newest is None or newest.step != number:
            return str(number)
        if has_changed:
            return str(number + 1)
        if checkpointer.last is None:
            checkpointer.clean_up_after(newest)
        return ""
