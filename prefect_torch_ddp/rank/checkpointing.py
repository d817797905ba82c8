"""Owns the objects that user code tracks: when they are saved, and how they are restored.

Owns the refusal of objects that can't be tracked. Pure.
"""

import logging
import time
from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from prefect_torch_ddp.checkpoint.checkpointer import Checkpointer, CheckpointMetadata, Writer
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import check_name
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.checkpoint.rank_store import (
    KeyValueStore,
    open_rank_store,
    set_gone,
    wait_for,
)
from prefect_torch_ddp.checkpoint.restore import Restorer, keeps_its_state
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.checkpoint.serial import check_loadable
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.checkpoint_status import CheckpointStatus
from prefect_torch_ddp.rank.config import RankConfig, Stage
from prefect_torch_ddp.rank.generators import Generators
from prefect_torch_ddp.rank.gradients.share_weights import unwrapped
from prefect_torch_ddp.rank.heartbeat import HeartbeatWriter
from prefect_torch_ddp.rank.loop.state import Place, Position, TrainingState
from prefect_torch_ddp.rank.reporter import Reporter

logger = logging.getLogger(__name__)

CHANGED = "changed"
FAILED_GRACE_S = 5.0
"""How long a rank that failed goes on writing a checkpoint that is under way."""
QUIET_S = 0.5
"""How long it does so before its error is told."""


class Tracker:
    """Saves and restores what user code tracks, together with the random generators and the
    place in the training.
    """

    def __init__(
        self,
        config: RankConfig,
        place: Place,
        state: TrainingState,
        reporter: Reporter,
        heartbeat: HeartbeatWriter,
    ) -> None:
        """Make it; the storage is asked for a checkpoint when the first object is tracked."""
        self._config = config
        self._place = place
        self._state = state
        self._reporter = reporter
        self._heartbeat = heartbeat
        self._objects: dict[str, Any] = {}
        self.checkpoint_status = CheckpointStatus(config, place, self._objects)
        self._has_begun = False
        self._generators = Generators(config, place, state)
        self._rank_store: KeyValueStore | None = None
        self._restorer: Restorer | None = None
        self._checkpointer: Checkpointer | None = None
        self._is_passing_by = False
        self._is_own_save = False
        """Whether the newest checkpoint was made outside of `steps`, which don't tell then
        whether anything has changed."""
        self._saved_at = time.monotonic()

    def track(self, objects: Mapping[str, Any]) -> None:
        """Take objects, and restore them where there is a checkpoint."""
        check_trackable(objects, self._objects, self._config.stage, has_begun=self._has_begun)
        with self._heartbeat.during(Phase.RESTORING):
            if self._restorer is None:
                self._restorer = self._open(
                    {name for name, item in objects.items() if keeps_its_state(unwrapped(item))}
                )
            for name, item in objects.items():
                bare = unwrapped(item)
                if self._checkpointer is not None:
                    check_loadable(name, bare.state_dict())  # not only at the first checkpoint
                self._restorer.restore(name, bare)
                self._objects[name] = bare
            self._generators.go_on()

    def begin(self) -> None:
        """Take no further objects."""
        self._has_begun = True
        if self._restorer is None:
            self._set_gone()  # or ranks that track something would wait for this one

    def set_generators(self) -> None:
        """Set this rank's random generators, before the first step of this process."""
        if self._generators.begin():
            self._saved_at = time.monotonic()

    def is_due_by_time(self) -> bool:
        """Tell whether so many seconds have passed; rank 0's clock decides for all."""
        every_s = self._config.checkpoint.every_s
        if every_s is None or self._checkpointer is None or self._place.rank != 0:
            return False
        return time.monotonic() - self._saved_at >= every_s

    def save_if(self, *, forced: bool, by_time: bool = False) -> None:
        """Save if there is a reason to, the same on all ranks, and this step isn't saved
        yet.
        """
        if self._checkpointer is None:
            return
        self._checkpointer.raise_if_over()
        every_steps, step = self._config.checkpoint.every_steps, self._state.step
        by_steps = every_steps is not None and step > 0 and step % every_steps == 0
        if (forced or by_time or by_steps) and self._state.saved != self._state.checkpoint_number:
            self._save(self._checkpointer)

    def save_outside(self) -> None:
        """Save at once, outside of `steps`; a step that has its checkpoint already gets another
        one, with the next number.

        Not behind a call of `steps` that was over before the checkpoint this run resumes from,
        nor behind one that was stopped from outside: that code runs a second time there, or too
        early.
        """
        if self._checkpointer is None or self._is_passing_by or self._state.stopped_by is not None:
            return
        self._checkpointer.raise_if_over()
        self._save(self._checkpointer, is_own=True)
        self._generators.saved_outside()

    def pass_by(self, *, is_over: bool, is_next: bool = False) -> None:
        """Take note whether the newest call of `steps` was over before the checkpoint that this
        run resumes from.

        Args:
            is_over: it was.
            is_next: the checkpoint was made right behind it: the code up to there runs again,
                and what it draws doesn't count.
        """
        self._is_passing_by = is_over and not is_next
        if is_next:
            self._generators.repeat()

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

    def _wait_a_little(self, checkpointer: Checkpointer, error: BaseException | None) -> None:
        """Let a rank that failed write its checkpoint.

        The error itself goes home when all is closed, so it is told here.
        """
        checkpointer.wait(QUIET_S)
        if checkpointer.is_writing:
            words = "rank %d failed: %s: %s; it waits at most %g s for its checkpoint that is being written"
            logger.error(words, self._place.rank, type(error).__name__, error, FAILED_GRACE_S)
            checkpointer.wait(FAILED_GRACE_S - QUIET_S)

    def _open(self, kept: Collection[str]) -> Restorer:
        config = self._config
        if config.stage == "evaluate":
            restorer = Restorer.at_step(
                config.storage, config.run_id, config.restore_step, config.restore_attempt
            )
        else:
            self._rank_store = self._rank_store or open_rank_store(self._place.world_size)
            own = ResumePoint(config.storage, config.run_id)
            if self._place.rank == 0:
                restorer = Restorer.choose(
                    own, config.attempt, config.resume_from, self._rank_store, kept
                )
            else:
                restorer = Restorer.follow(own, config.resume_from, self._rank_store)
            self._checkpointer = self._make_checkpointer(self._rank_store)
            self._state.trouble = self.checkpoint_status.trouble
            self._generators.restorer = restorer
        self.checkpoint_status.begin(restorer, self._checkpointer)
        if restorer.manifest is not None:
            self._adopt(restorer.manifest, is_ours=restorer.is_ours)
        return restorer

    def _set_gone(self) -> None:
        if self._config.stage in ("train", "task"):
            with suppress(
                RuntimeError
            ):  # the process group isn't up, or its store went with the rank that had it
                self._rank_store = self._rank_store or open_rank_store(self._place.world_size)
                set_gone(self._rank_store, self._place.rank)

    def _make_checkpointer(self, rank_store: KeyValueStore) -> Checkpointer:
        config, policy = self._config, self._config.checkpoint
        writer = Writer(
            config.storage, config.run_id, config.attempt, self._place.rank, self._place.world_size
        )
        committer = Committer(config.storage, config.run_id, config.attempt, policy)
        return Checkpointer(
            writer,
            rank_store,
            committer,
            before_commit=self._reporter.flush,
            on_failure=policy.on_failure,
        )

    def _adopt(self, manifest: Manifest, *, is_ours: bool) -> None:
        """Go on from where the checkpoint was made."""
        position = Position.from_json(manifest.position)
        self._state.step = manifest.step - position.num_own_saves
        self._state.epoch = manifest.epoch
        self._state.position = position if is_ours else replace(position, stopped_early=False)
        self._state.saved = manifest.step if is_ours else None
        self._is_own_save = is_ours and position.in_own_loop
        self._reporter.restore(manifest.metrics)

    def _save(
        self, checkpointer: Checkpointer, *, is_own: bool = False, is_last: bool = False
    ) -> None:
        state = self._state
        with self._heartbeat.during(Phase.SAVING):
            checkpointer.wait_for_turn(state.step)
            if self._is_own_save and checkpointer.was_alone:
                state.give_number_back()  # the other ranks didn't count that one
            if is_own:
                state.take_next_number()
            if self._generators.are_the_users:
                state.position = replace(state.position, in_own_loop=True)
            elif is_own and self._generators.have_begun:
                state.position = replace(state.position, is_behind=True)
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
            checkpointer.save(metadata, self._objects, self._generators.to_come())

    def _has_changed(self, checkpointer: Checkpointer) -> bool:
        """Tell whether this rank has to save what is behind a checkpoint outside of `steps`."""
        if not self._is_own_save or self._state.stopped_by is not None:
            return False
        manifest = self._restorer.manifest if self._restorer is not None else None
        restored = {} if manifest is None else {item.name: item.digest for item in manifest.objects}
        return checkpointer.has_changed(self._objects, checkpointer.written or restored)

    def _finish(self, checkpointer: Checkpointer) -> None:
        checkpointer.wait()
        checkpointer.raise_if_over()
        assert self._rank_store is not None
        has_changed = self._has_changed(checkpointer)
        if self._place.rank != 0:
            self._rank_store.set(f"ended/{self._place.rank}", CHANGED if has_changed else "")
        else:
            self._rank_store.set(
                "last", self._what_is_left(checkpointer, self._rank_store, has_changed=has_changed)
            )
        number = wait_for(self._rank_store, "last", rank=0)
        if number:
            self._is_own_save = False
            self._state.take_number(int(number))
            self._save(checkpointer, is_last=True)
            checkpointer.wait()
            checkpointer.raise_failure()

    def _what_is_left(
        self, checkpointer: Checkpointer, rank_store: KeyValueStore, *, has_changed: bool
    ) -> str:
        """Return, on rank 0, the number of the checkpoint that is still to be made; empty where
        there is none.
        """
        newest, number = self.checkpoint_status.last, self._state.checkpoint_number
        if newest is None or newest.step != number:
            return str(number)
        others = range(1, self._place.world_size) if self._is_own_save else ()
        if has_changed or any(
            wait_for(rank_store, f"ended/{rank}", rank) == CHANGED for rank in others
        ):
            return str(number + 1)
        if checkpointer.last is None:
            checkpointer.clean_up_after(newest)
        return ""


def check_trackable(
    objects: Mapping[str, Any], tracked: Container[str], stage: Stage, *, has_begun: bool
) -> None:
    """Refuse what can't be tracked.

    Args:
        objects: by the names that they shall have.
        tracked: the names that are taken.
        stage: what this rank does.
        has_begun: whether the first step has.

    Raises:
        InvalidParamsError: names the object, and says why.
    """
    if has_begun:
        msg = f"ctx.track({', '.join(objects)}) came after ctx.steps had begun: track everything before the first step"
        raise InvalidParamsError(msg)
    if stage == "prepare":
        msg = "ctx.track in prepare: there is nothing to resume; write the dataset below ctx.data"
        raise InvalidParamsError(msg)
    for name, item in objects.items():
        check_name(name)
        if name in tracked:
            msg = f"{name!r} is tracked already; every tracked object needs a name of its own"
            raise InvalidParamsError(msg)
        lacking = [
            method
            for method in ("state_dict", "load_state_dict")
            if not callable(getattr(item, method, None))
        ]
        if lacking:
            msg = f"{name!r} can't be tracked: {type(item).__name__} has no {' and no '.join(lacking)}"
            raise InvalidParamsError(msg)
