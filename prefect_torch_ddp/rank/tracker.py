"""Owns the objects that user code tracks: when they are saved, and how they are restored."""

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from prefect_torch_ddp.checkpoint.checkpointer import Checkpointer, Moment, Writer
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.keys import check_name
from prefect_torch_ddp.checkpoint.manifest import Manifest, best, checkpoint_ref, read_manifest
from prefect_torch_ddp.checkpoint.meeting import Meeting, open_meeting, say_gone, wait_for
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.checkpoint.retention import Retention
from prefect_torch_ddp.checkpoint.source import Source
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.pulse import Phase
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.export import leave_model, model_among
from prefect_torch_ddp.rank.gradients import unwrapped
from prefect_torch_ddp.rank.pulse import PulseBoard
from prefect_torch_ddp.rank.reporter import Reporter
from prefect_torch_ddp.rank.seeding import seed_rank
from prefect_torch_ddp.rank.state import Place, Position, TrainingState

logger = logging.getLogger(__name__)

FAILED_GRACE_S = 5.0
"""How long a rank that failed goes on writing a checkpoint that is under way."""


class Tracker:
    """Saves and restores what user code tracks, together with the random generators and the place in the training."""

    def __init__(self, config: RankConfig, place: Place, state: TrainingState, reporter: Reporter, pulse: PulseBoard) -> None:
        """Make it; the storage is asked for a checkpoint when the first object is tracked."""
        self._config = config
        self._place = place
        self._state = state
        self._reporter = reporter
        self._pulse = pulse
        self._objects: dict[str, Any] = {}
        self._has_begun = False
        self._has_generators = False
        self._meeting: Meeting | None = None
        self._restorer: Restorer | None = None
        self._checkpointer: Checkpointer | None = None
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()

    def track(self, objects: Mapping[str, Any]) -> None:
        """Take objects, and restore them where there is a checkpoint."""
        self._check(objects)
        with self._pulse.during(Phase.RESTORING):
            if self._restorer is None:
                self._restorer = self._open()
            for name, item in objects.items():
                bare = unwrapped(item)
                self._restorer.restore(name, bare)
                self._objects[name] = bare

    def begin(self) -> None:
        """Take no further objects."""
        self._has_begun = True
        if self._restorer is None:
            self._say_gone()  # or ranks that track something would wait for this one

    def set_generators(self) -> None:
        """Set this rank's random generators, before the first step of this process."""
        if self._has_generators:
            return
        self._has_generators = True
        restored = self._restorer is not None and self._restorer.restore_generators(self._place.rank)
        if not restored:
            seed_rank(self._config.seed, self._state.step, self._place.rank)
        if self._restorer is not None:
            self._restorer.release()
        self._saved_at = time.monotonic()

    def is_due_by_time(self) -> bool:
        """Tell whether so many seconds have passed; rank 0's clock decides for all."""
        every_s = self._config.checkpoint.every_s
        if every_s is None or self._checkpointer is None or self._place.rank != 0:
            return False
        return time.monotonic() - self._saved_at >= every_s

    def save_if(self, *, forced: bool, by_time: bool = False) -> None:
        """Save if there is a reason to, the same on all ranks, and this step isn't saved yet."""
        if self._checkpointer is None:
            return
        self._checkpointer.raise_if_over()
        every_steps, step = self._config.checkpoint.every_steps, self._state.step
        by_steps = every_steps is not None and step > 0 and step % every_steps == 0
        if (forced or by_time or by_steps) and step != self._saved_step:
            self._save(self._checkpointer)
        elif forced and self._state.share is None and not self._state.stop_agreed:
            logger.warning("step %d has its checkpoint already: what has changed since its end is not saved", step)

    def close(self, *, failed: bool) -> None:
        """Write the training's last checkpoint, unless it failed or has it already.

        Raises:
            CheckpointError: it can't be written.
        """
        if self._checkpointer is not None:
            with self._pulse.during(Phase.SAVING):
                if failed:
                    self._checkpointer.wait(FAILED_GRACE_S)
                else:
                    self._finish(self._checkpointer)
        if not failed:  # else the gang ends, and asking a store whose host is gone may take minutes
            self._say_gone()

    def outcome(self) -> dict[str, Any]:
        """Return the run's checkpoints, on rank 0, and where this attempt went on from."""
        storage, run_id, policy = self._config.storage, self._config.run_id, self._config.checkpoint
        restored = self._restorer.manifest if self._restorer is not None else None
        last = self._last()
        top = None
        if policy.best_metric is not None and self._place.rank == 0:
            top = best(storage, run_id, policy.best_metric, policy.best_mode)
        return {
            "last_checkpoint": None if last is None else checkpoint_ref(storage, last).model_dump(),
            "best_checkpoint": None if top is None else top.model_dump(),
            "resumed_from_step": None if restored is None else restored.step,
        }

    def export_model(self, workload: str) -> str | None:
        """Leave the model of the checkpoint that is evaluated, on rank 0; return its URI, None where there is none."""
        config, policy = self._config, self._config.checkpoint
        chosen = self._last()
        if config.evaluate_on == "best" and policy.best_metric is not None:
            top = best(config.storage, config.run_id, policy.best_metric, policy.best_mode)
            chosen = None if top is None else read_manifest(config.storage, config.run_id, top.step)
        name = model_among(self._objects)
        return None if chosen is None or name is None else leave_model(config, workload, chosen, name)

    def last_step(self) -> int | None:
        """Return the step of the run's newest checkpoint, on rank 0; None where there is none."""
        last = self._last()
        return None if last is None else last.step

    def trouble(self) -> str:
        """Say, on rank 0, since when there has been no checkpoint and why; nothing where the last one that was due is there."""
        reason = self._checkpointer.trouble if self._checkpointer is not None else ""
        if not reason:
            return ""
        last = self._last()
        return f"no checkpoint {'yet' if last is None else f'since step {last.step}'}: {reason}"

    def _last(self) -> Manifest | None:
        last = self._checkpointer.last if self._checkpointer is not None else None
        if last is None and self._place.rank == 0 and self._restorer is not None and self._restorer.is_ours:
            return self._restorer.manifest
        return last

    def _check(self, objects: Mapping[str, Any]) -> None:
        if self._has_begun:
            msg = f"rank.track({', '.join(objects)}) came after rank.steps had begun: track everything before the first step"
            raise InvalidParamsError(msg)
        if self._config.stage == "prepare":
            msg = "rank.track in prepare: there is nothing to resume; write the dataset below rank.data"
            raise InvalidParamsError(msg)
        for name, item in objects.items():
            check_name(name)
            if name in self._objects:
                msg = f"{name!r} is tracked already; every tracked object needs a name of its own"
                raise InvalidParamsError(msg)
            lacking = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(item, method, None))]
            if lacking:
                msg = f"{name!r} can't be tracked: {type(item).__name__} has no {' and no '.join(lacking)}"
                raise InvalidParamsError(msg)

    def _open(self) -> Restorer:
        config = self._config
        if config.stage == "evaluate":
            restorer = Restorer.at_step(config.storage, config.run_id, config.restore_step)
        else:
            self._meeting = self._meeting or open_meeting(self._place.world_size)
            own = Source(config.storage, config.run_id)
            restorer = Restorer.resuming(own, config.attempt, config.resume_from, self._place.rank, self._meeting)
            self._checkpointer = self._make_checkpointer(self._meeting)
            self._state.trouble = self.trouble
        if restorer.manifest is not None:
            self._adopt(restorer.manifest, is_ours=restorer.is_ours)
        return restorer

    def _say_gone(self) -> None:
        if self._config.stage in ("train", "task"):
            with suppress(RuntimeError):  # the process group isn't up, or its store went with the rank that had it
                self._meeting = self._meeting or open_meeting(self._place.world_size)
                say_gone(self._meeting, self._place.rank)

    def _make_checkpointer(self, meeting: Meeting) -> Checkpointer:
        config, policy = self._config, self._config.checkpoint
        retention = Retention(policy.keep_last, policy.keep_best, policy.best_metric, policy.best_mode)
        writer = Writer(config.storage, config.run_id, config.attempt, self._place.rank, self._place.world_size)
        committer = Committer(config.storage, config.run_id, config.attempt, retention)
        return Checkpointer(writer, meeting, committer, before_commit=self._reporter.flush, on_failure=policy.on_failure)

    def _adopt(self, manifest: Manifest, *, is_ours: bool) -> None:
        """Go on from where the checkpoint was made."""
        position = Position.from_json(manifest.position)
        self._state.step = manifest.step
        self._state.epoch = manifest.epoch
        self._state.position = position if is_ours else replace(position, stopped_early=False)
        self._saved_step = manifest.step if is_ours else None
        self._reporter.restore(manifest.metrics)

    def _save(self, checkpointer: Checkpointer, *, is_last: bool = False) -> None:
        state = self._state
        self._saved_step = state.step
        self._saved_at = time.monotonic()
        with self._pulse.during(Phase.SAVING):
            moment = Moment(state.step, state.epoch, state.position.as_json(), self._reporter.newest(), is_last)
            checkpointer.save(moment, self._objects)

    def _finish(self, checkpointer: Checkpointer) -> None:
        checkpointer.wait()
        checkpointer.raise_if_over()
        assert self._meeting is not None
        assert self._restorer is not None
        if self._place.rank != 0:
            self._meeting.say(f"ended/{self._place.rank}", "")
        else:
            newest = self._last()
            has_it = newest is not None and newest.step == self._state.step
            if newest is not None and has_it and checkpointer.last is None:
                checkpointer.clean_up_after(newest)
            self._meeting.say("last", "skip" if has_it else "save")
        if wait_for(self._meeting, "last", speaker=0) == "save":
            self._save(checkpointer, is_last=True)
            checkpointer.wait()
            checkpointer.raise_failure()
