"""The saver: writes a training's checkpoints, from the first to the last one at its end."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prefect_torch_ddp.checkpoint.checkpointer import Checkpointer
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.files import OpenFile, close_all
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter
from prefect_torch_ddp.rank.strategies.strategy import Strategy
from prefect_torch_ddp.rank.training.loop_progress import Moment
from prefect_torch_ddp.rank.training.replay import Replay
from prefect_torch_ddp.rank.training.reporting.reporter import FAILED_GRACE_S, Reporter
from prefect_torch_ddp.rank.training.saves import Reason, SaveClock, due
from prefect_torch_ddp.rank.training.tracked import TrackedWatch

logger = logging.getLogger(__name__)

CHANGED = "changed"


class Saver:
    """Saves the tracked objects with the random generators, the position and the metrics."""

    def __init__(  # noqa: PLR0913, PLR0917 - what a checkpoint is made of
        self,
        config: RankConfig,
        info: RankInfo,
        replay: Replay,
        reporter: Reporter,
        heartbeat: HeartbeatWriter,
        objects: dict[str, Any],
        strategy: Strategy,
    ) -> None:
        """Make it; nothing is saved before `open`.

        Args:
            config: of the run.
            info: which rank this is.
            replay: what runs again on resume; its numbers are those of the checkpoints.
            reporter: has the metrics, and writes its records before a checkpoint counts.
            heartbeat: shows that a rank saves.
            objects: the tracked ones, by name.
            strategy: says which shards of them this rank saves.
        """
        self._config = config
        self._info = info
        self._replay = replay
        self._numbers = replay.numbers
        self._reporter = reporter
        self._heartbeat = heartbeat
        self.objects = objects
        self.strategy = strategy
        self._watch = TrackedWatch()
        self.holds_folders = False
        """Whether the checkpoints are folders that user code wrote, in place of objects."""
        run = (config.storage, config.run_id, config.attempt)
        self._clock = SaveClock(config.checkpoint.every_s, time.monotonic())
        self._committer = Committer(*run, config.checkpoint, self._committed)
        self._store: KeyValueStore | None = None
        self._restorer: Restorer | None = None
        self._checkpointer: Checkpointer | None = None

    def open(self, store: KeyValueStore, restorer: Restorer) -> None:
        """Save from now on: the training has restored its first object."""
        self._store, self._restorer = store, restorer
        writes = self._committer, self._reporter.flush, self._clock.note
        resumes = restorer.manifest is not None
        self._checkpointer = Checkpointer(self._info.rank, store, *writes, resumes=resumes)

    @property
    def is_open(self) -> bool:
        """Whether there is something to save."""
        return self._checkpointer is not None

    @property
    def last(self) -> Manifest | None:
        """The run's newest checkpoint, on rank 0; None if there is none."""
        restorer = self._restorer
        if self._committer.last is not None or self._info.rank != 0 or restorer is None:
            return self._committer.last
        return restorer.manifest if restorer.is_ours else None

    def check(self, name: str, item: Any) -> None:
        """Refuse an object whose state couldn't be read back, not only at the first save."""
        if self._checkpointer is not None:
            self._checkpointer.check_tracked(name, item, self._info.world_size)

    def take(self, objects: Mapping[str, Any]) -> None:
        """Take objects that were checked, all of them or none."""
        self._watch.take(objects)
        self.objects.update(objects)

    def trouble(self) -> str:
        """Say, on rank 0, since when there has been no checkpoint and why, or nothing."""
        reason = self._checkpointer.trouble if self._checkpointer is not None else ""
        since = "yet" if self.last is None else f"since step {self.last.step}"
        return f"no checkpoint {since}: {reason}" if reason else ""

    def begin_interval(self) -> None:
        """Count the seconds until the next checkpoint from here."""
        self._clock.begin(time.monotonic())

    def due(
        self, asked: Reason | None = None, *, by_clock: bool = False, moment: Moment | None = None
    ) -> Reason | None:
        """Return why a checkpoint is due, or None.

        Args:
            asked: what the training or all ranks asked for.
            by_clock: also by rank 0's clock, which the other ranks don't know.
            moment: where the training is; None: where `ctx.steps` is.
        """
        if self._checkpointer is None:
            return None
        decides, is_writing = by_clock and self._info.rank == 0, self._checkpointer.is_writing
        pace = self._clock.pace(is_writing=is_writing) if decides else None
        moment = moment or self._numbers.moment
        return due(self._config.checkpoint, moment, time.monotonic(), asked, pace)

    def raise_failure(self) -> None:
        """Raise what an earlier save failed with, if that ends the training."""
        if self._checkpointer is not None:
            self._checkpointer.raise_failure()

    def save_if(self, reason: Reason | None) -> None:
        """Save for a reason, the same on all ranks."""
        self.raise_failure()
        if reason is not None:
            self._save()

    def save_outside(self) -> None:
        """Save outside of `steps`."""
        self.raise_failure()
        with self._heartbeat.during(Phase.SAVING):
            self._numbers.count_own_save()
        self._save()

    def save_folder(
        self, step: int, folder: str, files: Sequence[OpenFile], stall_s: float
    ) -> None:
        """Save the files of a folder as the checkpoint of a step, in the background.

        Args:
            step: its number, as user code counts.
            folder: its name below `ctx.checkpoint_folder`.
            files: this rank's, which are closed when they are written.
            stall_s: how long the training has waited for them to be made.
        """
        checkpointer, numbers = self._checkpointer, self._numbers
        assert checkpointer is not None
        try:
            self.begin_interval()
            numbers.take(step)
            numbers.enter_own_loop()
            number = numbers.begin_save()
            self._reporter.mark_checkpoint()
            position = {**numbers.stored(), "folder": folder}
            at = (self._config.run_id, number, self._config.attempt, numbers.epoch_done)
            metrics, reports = self._reporter.newest.of_checkpoint(is_rated=self._info.rank == 0)
            of_all = (position, self._info.world_size, metrics)
            manifest = Manifest(*at, *of_all, reports=reports)
            weights = self._reporter.newest.weights()
            checkpointer.save_files(manifest, files, weights=weights, stall_s=stall_s)
        except BaseException:
            close_all(files)
            raise

    def finish_folders(self) -> None:
        """Wait until the last folder is written, and delete what isn't needed then."""
        checkpointer = self._checkpointer
        assert checkpointer is not None
        checkpointer.wait()
        checkpointer.raise_failure(is_last=True)
        if self._committer.last is not None and not self._committer.is_clean:
            self._committer.clean_up(self._committer.last, is_last=True)
        checkpointer.say_last()

    def give_up(self, error: BaseException | None) -> None:
        """Wait a little for a checkpoint under way: the training failed."""
        if self._checkpointer is not None and self._checkpointer.is_writing:
            # The error itself goes home when all is closed, so it is logged here.
            text = "failed: %r; it waits at most %g s for its checkpoint"
            logger.error(text, error, FAILED_GRACE_S)
            self._checkpointer.wait(FAILED_GRACE_S)

    def finish(self) -> None:
        """Write the last checkpoint, if the newest one doesn't have everything."""
        checkpointer, store = self._checkpointer, self._store
        assert checkpointer is not None
        assert store is not None
        checkpointer.wait()
        checkpointer.raise_failure()
        rank, world_size, numbers = self._info.rank, self._info.world_size, self._numbers
        restored = None if self._restorer is None else self._restorer.manifest
        # After a loop that was stopped from outside code comes too early to be saved.
        is_over = numbers.is_at_end or numbers.progress.stopped_by is not None
        checks = not is_over and numbers.is_saved
        has_changed = checks and checkpointer.has_changed(
            self.strategy.shares(self.objects), restored
        )
        if rank != 0:
            store.set(f"ended/{rank}", CHANGED if has_changed else "")
        else:
            if checks:
                texts = [store.wait_for(f"ended/{other}", other) for other in range(1, world_size)]
                has_changed |= CHANGED in texts or self._reporter.newest.has_unsaved_best()
            store.set("last", self._number_left(has_changed=has_changed))
        if number := store.wait_for("last", rank=0):
            numbers.take(int(number))
            self._save(is_last=True)
            checkpointer.wait()
            checkpointer.raise_failure(is_last=True)
        checkpointer.say_last()

    def _save(self, *, is_last: bool = False) -> None:
        checkpointer, config, numbers = self._checkpointer, self._config, self._numbers
        if checkpointer is None:
            return
        with self._heartbeat.during(Phase.SAVING):
            if not (numbers.has_begun or self._replay.must_arrive):
                numbers.enter_own_loop()
            self.begin_interval()
            number = numbers.begin_save()
            self._watch.see_save(self.objects, number)
            self._reporter.mark_checkpoint()
            at = (config.run_id, number, config.attempt, numbers.progress.epoch, numbers.stored())
            is_rated = self._info.rank == 0
            metrics, reports = self._reporter.newest.of_checkpoint(is_rated=is_rated)
            manifest = Manifest(*at, self._info.world_size, metrics, reports=reports)
            weights = self._reporter.newest.weights()
            shares, replicas = self.strategy.shares(self.objects), self.strategy.take_replicas()
            state = self.objects, shares, replicas
            checkpointer.save(manifest, *state, weights=weights, is_last=is_last)

    def _number_left(self, *, has_changed: bool) -> str:
        """Return, on rank 0, the number of the checkpoint that is still to be made, or nothing."""
        numbers, number = self._numbers, self._numbers.current
        made = self.last if self.last is not None and self.last.step == number else None
        if made is not None and has_changed:
            made, number = None, number + 1
        is_stopped = numbers.progress.stopped_by is not None
        if made is None and not is_stopped:  # else every second counts
            self._committer.make_room(number)
        if numbers.has_begun and not is_stopped and not self._replay.is_before_call:
            self._committer.write_end(number, None if made is None else made.attempt)
        if made is None:
            return str(number)
        if not self._committer.is_clean:
            self._committer.clean_up(made, is_last=True)
        return ""

    def _committed(self, manifest: Manifest) -> None:
        pace = self._clock.pace()
        self._reporter.committed(manifest, None if pace is None else pace.every_s)
