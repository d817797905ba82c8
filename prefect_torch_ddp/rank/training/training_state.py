"""The state of a training: takes the objects of user code, restores them, and has them saved."""

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect_torch_ddp.checkpoint.rank_store import KeyValueStore, open_rank_store
from prefect_torch_ddp.checkpoint.restore import Restorer
from prefect_torch_ddp.checkpoint.resume_point import ResumePoint
from prefect_torch_ddp.checkpoint.state.own_state import OwnState
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.protocol.heartbeat import Phase
from prefect_torch_ddp.rank.config import RankConfig, RankInfo
from prefect_torch_ddp.rank.generators import seed_rank
from prefect_torch_ddp.rank.heartbeat_writer import HeartbeatWriter
from prefect_torch_ddp.rank.training.calls.passes import Passes
from prefect_torch_ddp.rank.training.replay import Replay
from prefect_torch_ddp.rank.training.reporting.reporter import Reporter
from prefect_torch_ddp.rank.training.saver import Saver
from prefect_torch_ddp.rank.training.saves import Reason
from prefect_torch_ddp.rank.training.tracked import check_trackable

logger = logging.getLogger(__name__)


class TrainingState:
    """Restores the tracked objects, the random generators and the position.

    On resume, user code runs again from the top. Saves are skipped until it reaches the checkpoint;
    there the tracked objects are restored a second time, which undoes what that code did to them.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what is restored, and whoever takes it
        self,
        config: RankConfig,
        info: RankInfo,
        replay: Replay,
        saver: Saver,
        reporter: Reporter,
        heartbeat: HeartbeatWriter,
    ) -> None:
        """Make it; the storage is asked for a checkpoint when the first object is tracked."""
        self._config = config
        self._info = info
        self._numbers = replay.numbers
        self._replay = replay
        self._saver = saver
        self._reporter = reporter
        self._heartbeat = heartbeat
        self._objects = saver.objects
        self._rank_store: KeyValueStore | None = None
        self._restorer: Restorer | None = None
        self._restores: set[str] = set()
        """The names of what the checkpoint has, or has to have."""
        self._followed: list[Passes] = []
        """Those whose place is saved; of others nothing is to be held."""
        self._warned: set[str] = set()
        self._expects_save = False

    @property
    def resumed(self) -> Restorer | None:
        """What this training resumed from; None if it tracks nothing."""
        return self._restorer

    def track(self, objects: Mapping[str, Any]) -> None:
        """Take objects, all or none, and restore them if there is a checkpoint."""
        self._check(objects)
        self._take(self._saver.strategy.tracked(objects))

    def track_each(self, objects: Mapping[str, Any], *, begins_anew: bool) -> None:
        """Take objects whose state is each rank's own."""
        self._check(objects)
        info = self._info
        own = (OwnState(each, info.rank, info.world_size, begins_anew) for each in objects.values())
        self._take(dict(zip(objects, own, strict=True)))

    def follow(self, iterable: Iterable[Any], *, begins_anew: bool) -> Passes:
        """Take, in addition to what is tracked, where this rank is in a loader of others.

        Each loader has one place, whatever call of `steps` it is in. What another number of ranks
        saved isn't restored.
        """
        for passes in self._followed:
            if passes.iterable is iterable:
                return passes
        passes = Passes(iterable, begins_anew=begins_anew)
        if self._restorer is not None and passes.kind not in self._warned:
            self._warned.add(passes.kind)
            passes.warn_of_no_state()
        if passes.is_kept:
            # By its number, which is the same on resume; no name of the user's has a dash.
            name = f"steps-{len(self._followed)}"
            self._followed.append(passes)
            if self._restorer is not None:  # else nothing is tracked, and nothing is saved
                self._take_position(self._restorer, name, passes)
        return passes

    def open_folder(self, root: Path) -> Restorer:
        """Save folders from now on, in place of objects; put the newest one into an empty folder.

        Raises:
            InvalidParamsError: objects are tracked, or `steps` has begun; or the run's checkpoints
                aren't folders; or it is the prepare stage.
            CheckpointError: there are checkpoints, and none can be restored.
        """
        config = self._config
        if config.stage == "prepare":  # it claims no attempt
            msg = (
                "ctx.checkpoint_folder in prepare: there is nothing to resume; write the dataset "
                "below ctx.data"
            )
            raise InvalidParamsError(msg)
        if self._restorer is not None or self._numbers.has_begun:
            msg = (
                "ctx.checkpoint_folder and ctx.commit are for programs that write their own "
                "checkpoints: without ctx.track and ctx.steps, which make checkpoints themselves"
            )
            raise InvalidParamsError(msg)
        if config.resume_from is not None and config.resume_from.only_weights:
            msg = "only weights of tracked modules can be loaded, and these checkpoints are folders"
            raise InvalidParamsError(msg)
        with self._heartbeat.during(Phase.RESTORING):
            self._restorer = self._open(root)
            self._saver.holds_folders = True
            if config.stage == "evaluate":
                self._restorer.fetch_files(root)
        return self._restorer

    def begin(self) -> None:
        """Take no further objects: `steps` was called."""
        self._refuse_folders("ctx.steps")
        self._numbers.begin_steps()
        self._check_resumed()
        if self._restorer is None:
            self._set_gone()  # or ranks that track something would wait for this one
        else:
            self._restorer.note_chosen_options()

    def enter_call(self) -> None:
        """Come to a call of `steps` that isn't over: restore what code before it changed."""
        self._resume()
        self._numbers.enter_call()

    def due(self, asked: Reason | None = None, *, by_clock: bool = False) -> Reason | None:
        """Return why a checkpoint is due, or None; see `Saver.due`."""
        return None if self._replay.is_under_way else self._saver.due(asked, by_clock=by_clock)

    def save_if(self, reason: Reason | None) -> None:
        """Save for a reason, the same on all ranks."""
        if not self._replay.is_under_way:
            self._saver.save_if(reason)

    def save_if_left(self, *, asks_due: bool) -> None:
        """Save what a step made due that was left; warn once if there can't be one.

        Args:
            asks_due: whether the user's own loop asks `ctx.due`, and so knows when to save.
        """
        has_interval = self._config.checkpoint.has_interval
        is_idle = self._saver.is_open and not self._numbers.has_begun and not asks_due
        if is_idle and has_interval and "ctx.checkpoint" not in self._warned:
            self._warned.add("ctx.checkpoint")
            logger.warning(
                "ctx.checkpoint() without force=True writes nothing in a loop without ctx.steps. "
                "Checkpoints by checkpoint.every_s, every_steps and every_epochs are written if "
                "you call ctx.checkpoint(force=ctx.due(step).save) in each step"
            )
        if self._saver.is_open and self._numbers.progress.stopped_by is None:
            self._request(is_forced=False)

    def expect_save(self) -> None:
        """Take the next request: the user's own loop was asked to save and to stop."""
        self._expects_save = True

    def save_outside(self) -> None:
        """Save at once, outside of `steps`, under its own number if the step's is taken."""
        is_stopped = self._numbers.progress.stopped_by is not None
        if not self._saver.is_open or (is_stopped and not self._expects_save):
            return  # after a loop that was stopped from outside that code comes too early
        self._expects_save = False
        self._request(is_forced=True)

    def _request(self, *, is_forced: bool) -> None:
        """Save outside of `steps` if that is forced or due, or come to it on resume."""
        self._saver.raise_failure()
        if self._replay.is_under_way:
            # Whichever it is: what forced one may not do so again.
            if self._replay.pass_request(is_forced=is_forced):
                self._resume()
            return
        self._numbers.count_request()
        if is_forced or self.due() is not None:
            self._saver.save_outside()

    def has_saved(self, step: int) -> bool:
        """Tell, on rank 0 of a stopped training, if the newest checkpoint has its last step.

        Only a commit always has the step's number: other checkpoints count from 0 in the user's
        own loop, and in `steps` from a number that was taken between two calls.
        """
        last = self._saver.last
        if last is None or self._saver.holds_folders:
            return last is not None and last.step == step
        return last.step == self._numbers.current and not self._expects_save

    def close(self, *, failed: bool, error: BaseException | None = None) -> None:
        """Write the training's last checkpoint, unless it failed or has it already."""
        if self._saver.is_open:
            with self._heartbeat.during(Phase.SAVING):
                if failed:
                    self._saver.give_up(error)
                elif self._saver.holds_folders:
                    self._saver.finish_folders()
                else:
                    if self._replay.num_passed and self._replay.is_under_way:
                        self._resume()  # after passed calls nothing was made: it is undone
                    self._saver.finish()
        if not failed:  # else the gang ends, and asking a store whose host is gone may take minutes
            self._set_gone()
            self._check_resumed()
            self._warn_of_no_step()

    def _warn_of_no_step(self) -> None:
        """Say on rank 0 if there was nothing to add to the run of `resume_from`: it looks new."""
        restorer, numbers = self._restorer, self._numbers
        if restorer is None or restorer.is_ours or (manifest := restorer.manifest) is None:
            return
        is_whole = numbers.has_begun and numbers.progress.stopped_by is None
        if is_whole and self._info.rank == 0 and not numbers.has_added_to(manifest):
            logger.warning(
                "the training made no step: the checkpoint of step %d of run %s, which resume_from "
                "names, has all that were asked for. To train on, ask for more epochs or steps",
                *(manifest.step, manifest.run_id),
            )

    def _check_resumed(self) -> None:
        """Refuse a `resume_from` of a training that takes nothing from there; rank 0 looks."""
        config, restorer = self._config, self._restorer
        if not (config.trains and config.resume_from and self._info.rank == 0):
            return
        nothing = f"resume_from names run {config.resume_from.run_id}, but nothing was restored"
        if restorer is None:
            msg = (
                f"{nothing} from it: the function called neither ctx.track nor "
                "ctx.checkpoint_folder; call one of them before ctx.steps, or leave out resume_from"
            )
            raise InvalidParamsError(msg)
        if not restorer.is_ours and restorer.left:
            there, here = (", ".join(sorted(names)) for names in (restorer.left, self._objects))
            msg = (
                f"{nothing} of {there}, which its checkpoint has: the function tracks {here}; use "
                "the same names, or leave out resume_from"
            )
            raise InvalidParamsError(msg)

    def _refuse_folders(self, name: str) -> None:
        if self._saver.holds_folders:
            msg = (
                f"this training saves by ctx.commit, so {name} has no checkpoint to be in: put "
                "everything into the folder, or use ctx.track and ctx.steps only"
            )
            raise InvalidParamsError(msg)

    def _check(self, objects: Mapping[str, Any]) -> None:
        self._refuse_folders("ctx.track")
        has_begun = self._numbers.has_begun
        check_trackable(objects, self._objects, self._config.stage, has_begun=has_begun)

    def _take(self, objects: Mapping[str, Any]) -> None:
        with self._heartbeat.during(Phase.RESTORING):
            if self._restorer is None:
                self._restorer = self._open()
            for name, item in objects.items():
                self._restorer.restore(name, item)
                self._restores.add(name)
                self._saver.check(name, item)
            self._saver.take(objects)
            if self._config.trains and self._numbers.own.in_own_loop:
                self._restorer.restore_generators(self._info.rank)

    def _take_position(self, restorer: Restorer, name: str, passes: Passes) -> None:
        item = OwnState(passes, self._info.rank, self._info.world_size)
        owners = 0 if restorer.manifest is None else restorer.manifest.num_owners(name)
        if owners not in (0, self._info.world_size):
            passes.saved_by = owners
        elif owners and not self._replay.has_arrived:  # else it is of a later call
            self._restores.add(name)
            with self._heartbeat.during(Phase.RESTORING):
                restorer.restore(name, item)
        self._saver.take({name: item})

    def _open(self, into: Path | None = None) -> Restorer:
        config = self._config
        own = ResumePoint(config.storage, config.run_id)
        if config.stage == "evaluate":
            restorer = Restorer(config.storage, (config.restore or own).manifest())
        else:
            store = self._rank_store = self._rank_store or open_rank_store(self._info.world_size)
            if self._info.rank == 0:
                restorer = Restorer.choose(own, config.attempt, config.resume_from, store, into)
            else:
                restorer = Restorer.follow(own, config.resume_from, store, into)
            self._saver.open(store, restorer)
        if (manifest := restorer.manifest) is not None:
            is_ours = self._replay.is_ours = restorer.is_ours
            self._numbers.adopt(manifest, is_ours=is_ours, had_ended=restorer.had_ended)
            if not config.trains:
                self._numbers.begin_evaluation()
            if is_ours:
                self._reporter.restore(manifest)
            else:  # what another run has validated is no value of this one
                self._reporter.mark_checkpoint()
        self._numbers.is_start_known = True
        return restorer

    def _resume(self) -> None:
        """Restore the checkpoint's point: generators, and objects that code changed since."""
        replay = self._replay
        # At the end: code after its last save ran again too.
        if replay.has_arrived and not self._numbers.is_at_end:
            return
        restorer = self._restorer if self._config.trains else None
        # A checkpoint may lack a generator, such as CUDA's of a training on CPUs.
        seed_rank(self._config.seed, self._numbers.progress.step, self._info.rank)
        # What an own loop left is none of the steps' business: undisturbed, they would begin
        # with generators of their own too.
        if restorer is not None and not self._numbers.own.in_own_loop:
            if replay.has_passed_any:
                replay.warn_of_missed_save()
                with self._heartbeat.during(Phase.RESTORING):
                    restorer.drop_replaced_options()
                    for name, item in self._objects.items():
                        if name in self._restores:
                            restorer.restore(name, item)
                    restorer.put_chosen_options()
            restorer.restore_generators(self._info.rank)
        if restorer is not None:
            restorer.release()
        replay.arrive()
        self._saver.begin_interval()

    def _set_gone(self) -> None:
        if self._config.trains:
            # RuntimeError: the process group isn't up, or its store went with the rank that had it.
            with suppress(RuntimeError):
                self._rank_store = self._rank_store or open_rank_store(self._info.world_size)
                self._rank_store.set(f"gone/{self._info.rank}", "")
