"""Transformers' Trainer: `trainer.train(resume_from_checkpoint=attach(trainer))`."""

import logging
import re
import shutil
import tempfile
from copy import copy
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from prefect_torch_ddp.integrations.refused import refuse_options, refuse_other_ranks
from prefect_torch_ddp.integrations.transformers_data import DataPosition
from prefect_torch_ddp.rank.context import RankContext, current_context

_CUT = "epoch-ended-early"
"""In commits of a training in which an epoch had fewer steps than Transformers computes."""
_NOT_ALL = re.compile(rf"(rng_state(_\d+)?|data_\d+)\.pth$|ended-|{_CUT}$")
"""What is committed only by who has just written it: other trainings too leave such files."""

logger = logging.getLogger(__name__)


def attach(trainer: Trainer) -> str | None:
    """Have a Trainer's checkpoints committed; return the newest one, for `train` to resume from.

    Returns None if there is none, or no RankContext, as under torchrun, where nothing changes.

    Raises:
        InvalidParamsError: the Trainer has an option with which a resumed training would differ or
            fail; the message names it. Or the newest commit is of another number of ranks.
    """
    if (ctx := current_context()) is None:
        return None
    args, others = trainer.args, trainer.callback_handler.callbacks
    refused = {
        f"rank {args.process_index} of {args.world_size} where it is {ctx.rank} of "
        f"{ctx.world_size}; without GPUs set use_cpu=True": (
            (args.process_index, args.world_size) != (ctx.rank, ctx.world_size)
        ),
        "load_best_model_at_end, whose checkpoint may be on another host": (
            args.load_best_model_at_end
        ),
        "save_strategy='best', which skips checkpoints that are due; set it to 'no', and "
        "CheckpointParams(best_metric=...)": args.save_strategy == "best",
        "ignore_data_skip, which begins an interrupted epoch again": args.ignore_data_skip,
        "save_only_model, without which there is no optimizer to resume": args.save_only_model,
        "FSDP and DeepSpeed, whose files are each rank's": (
            trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        ),
        "a callback that has a state, such as EarlyStoppingCallback, without "
        "restore_callback_states_from_checkpoint=True": (
            not args.restore_callback_states_from_checkpoint
            and any(isinstance(each, ExportableState) for each in others)
        ),
    }
    refuse_options(refused)
    refuse_other_ranks(ctx, "Transformers", "rng_state*.pth")  # without a number if there is one
    data = DataPosition(ctx, trainer)
    callback = _Callback(ctx, data)
    trainer.add_callback(callback)
    _save_apart(ctx, trainer, callback)
    run_epoch = trainer._run_epoch  # noqa: SLF001 - nothing public comes before its first step

    def run_epoch_if_left(**given: Any) -> None:
        others.remove(callback)  # those that a resume restores were put after it
        others.append(callback)
        if not callback.is_done:  # the Trainer asks whether it is to stop only after a step
            data.begin_epoch(given)
            run_epoch(**given)

    trainer._run_epoch = run_epoch_if_left  # noqa: SLF001
    return None if ctx.committed is None else str(ctx.committed)


def _save_apart(ctx: RankContext, trainer: Trainer, callback: "_Callback") -> None:
    """Have saves that the Trainer itself doesn't ask for made in a folder of this process.

    Several runs may have one output_dir, in which the Trainer itself may save nothing.
    """
    handler = trainer.callback_handler
    save, tell = trainer._save_checkpoint, handler.on_save  # noqa: SLF001
    save_to = trainer._get_output_dir  # noqa: SLF001
    # Beside checkpoint_folder, which is removed with its parent: names of commits stay as in
    # output_dir, and the Trainer, which removes old checkpoints, doesn't find the restored one.
    apart = tempfile.mkdtemp(prefix="saves-", dir=ctx.checkpoint_folder.parent)
    is_ours = False

    def save_checkpoint(*given: Any, **named: Any) -> None:
        nonlocal is_ours  # once for each save: callbacks may change `control` before on_save
        is_ours = callback.is_ours(trainer.args, trainer.state, trainer.control)
        if not is_ours:
            save(*given, **named)
            return
        best = trainer.state.best_model_checkpoint
        trainer._get_output_dir = lambda *_, **__: apart  # noqa: SLF001
        try:
            save(*given, **named)
        finally:
            trainer._get_output_dir = save_to  # noqa: SLF001
            trainer.state.best_model_checkpoint = best  # what is apart is removed

    def on_save(args: Any, state: Any, control: Any, **given: Any) -> Any:
        if not is_ours:
            return tell(args, state, control, **given)
        args = copy(args)  # for all callbacks: some look for the checkpoint
        args.output_dir = apart
        control = tell(args, state, control, **given)
        push = getattr(trainer, "push_in_progress", None)  # in the background, by push_to_hub
        if push is None or push.is_done():
            shutil.rmtree(apart, ignore_errors=True)  # what is being committed is held open
        return control

    trainer._save_checkpoint, handler.on_save = save_checkpoint, on_save  # noqa: SLF001


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Saves and stops when all ranks are to, and shows steps and metrics."""

    def __init__(self, ctx: RankContext, data: DataPosition) -> None:
        self._ctx, self._data = ctx, data
        self._keeps_best = ctx.config.checkpoint.best_metric is not None
        self._asked_at = 0  # the newest step at which the Trainer itself asked for no save
        self._saved_at = 0
        self._stops = self.is_done = False
        # In a commit after which the Trainer itself was to end. Another run trains on from there.
        self._end = f"ended-{ctx.config.run_id}"
        self._has_ended = ctx.committed is not None and (ctx.committed / self._end).exists()
        self._has_cut = ctx.committed is not None and (ctx.committed / _CUT).exists()
        self._is_left = False  # whether on_epoch_end is to save what on_step_end was asked for

    def is_ours(self, args: Any, state: Any, control: Any) -> bool:
        """Return whether the save that begins is one that the Trainer itself wouldn't make."""
        # A training that ends within an epoch is saved once; the Trainer would, at the epoch's end.
        is_last = control.should_training_stop and args.save_strategy == "epoch"
        return bool(self._asked_at == state.global_step and control.should_save and not is_last)

    def on_train_begin(self, _args: Any, state: Any, control: Any, **given: Any) -> None:
        self._saved_at = state.global_step
        if state.global_step > 0:
            self._data.refuse_other_sizes(given["train_dataloader"])
        if self._has_cut and state.global_step > 0:
            text = (
                "an epoch ended early before the checkpoint of step %d, for example because of "
                "should_epoch_stop: Transformers computes the position in the data from the step, "
                "so the batches differ from those of an uninterrupted training"
            )
            logger.warning(text, state.global_step)
        has_ended = self._has_ended and state.global_step > 0
        self.is_done = has_ended or state.global_step >= state.max_steps
        control.should_training_stop |= self.is_done

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        step, epoch = state.global_step, state.epoch or 0.0
        ends_epoch = int(epoch) if epoch and float(epoch).is_integer() else None
        self._ctx.progress(step, state.max_steps, epoch=ends_epoch or int(epoch) + 1)
        due = self._ctx.due(step, ends_epoch=ends_epoch)
        self._stops = due.stop  # after the save, which notes whether the Trainer itself is to end
        control.should_training_stop |= due.stop and not due.save
        if not control.should_save:
            self._asked_at = step
        control.should_save |= due.save or (self._keeps_best and control.should_evaluate)
        # on_epoch_end comes next and may evaluate, or end the training. One save after that has
        # both, while a second save of the step would write over the files of the first as they are
        # read.
        is_last = ends_epoch is not None or step >= state.max_steps
        if is_last or control.should_epoch_stop:
            self._is_left, control.should_save = control.should_save, False

    def on_epoch_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        is_whole = float(state.epoch or 0.0).is_integer()
        self._has_cut |= not is_whole and not control.should_training_stop
        if control.should_save:
            self._asked_at = 0
        is_evaluated = self._keeps_best and control.should_evaluate
        control.should_save |= self._is_left or is_evaluated or control.should_training_stop
        control.should_save &= self._saved_at != state.global_step
        self._is_left = False

    def on_evaluate(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        # An EarlyStoppingCallback may just have ended the training.
        control.should_save |= control.should_training_stop and self._saved_at != state.global_step

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        if self.is_done:
            numbers.pop("train_loss", None)  # the mean of no steps, 0
        self._ctx.report(**numbers)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder, rank = Path(args.output_dir, f"checkpoint-{state.global_step}"), self._ctx.rank
        has_ended = control.should_training_stop and state.global_step < state.max_steps
        own = {"rng_state.pth" if self._ctx.world_size == 1 else f"rng_state_{rank}.pth"}
        self._data.save(folder)
        own.add(self._data.file)
        for mark, is_set in ((self._end, has_ended), (_CUT, self._has_cut)):
            if rank == 0 and is_set:
                (folder / mark).touch()
                own.add(mark)
        files = [
            path.relative_to(folder)
            for path in folder.rglob("*")
            # Ranks may share the folder, and another training may have left files in it.
            if path.is_file()
            and (path.name in own or (rank == 0 and not _NOT_ALL.match(path.name)))
        ]
        self._ctx.commit(folder, step=state.global_step, files=files)
        self._saved_at = state.global_step
        control.should_training_stop |= self._stops
