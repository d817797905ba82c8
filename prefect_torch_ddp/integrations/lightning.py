"""Lightning's Trainer: `trainer.fit(model, data, ckpt_path=attach(trainer))`."""

import logging
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.utilities.data import _set_sampler_epoch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.plugins import AsyncCheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from pytorch_lightning.trainer.states import TrainerFn

from prefect_torch_ddp.checkpoint.state.serial import capture_generators, restore_generators
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.integrations.held_generators import capture_own, restore_own
from prefect_torch_ddp.integrations.refused import (
    reason_against,
    refuse_options,
    refuse_other_ranks,
    refuse_other_sizes,
    sizes_of,
)
from prefect_torch_ddp.rank.context import RankContext, current_context
from prefect_torch_ddp.rank.link import report_progress

_UNFIT = (
    "a restart would fail: fit(ckpt_path=...) refuses the checkpoint of step %d, which holds more "
    "than data (%s). Leave it out, for example by save_hyperparameters(ignore=[...]), or pass "
    "weights_only=False to fit, with which whoever can write to the storage can run code"
)
_UNWRITTEN = (
    "{}, the Trainer's CheckpointIO, has not written {} at step {} by the time that its "
    "save_checkpoint has returned, so no attempt could resume from that checkpoint: use one that "
    "writes to the path that it is given before it returns"
)

logger = logging.getLogger(__name__)


def attach(trainer: Trainer) -> str | None:
    """Have a Trainer's checkpoints committed; return the newest one, for `fit` to resume from.

    Returns None if there is none, or no RankContext, as under torchrun, where nothing changes.

    Raises:
        InvalidParamsError: the Trainer has an option with which a resumed training would differ or
            fail; the message names it. Or the newest commit is of another number of ranks. `fit`
            raises it if that commit is from the middle of an epoch of other data, or if a save has
            written no file.
    """
    if (ctx := current_context()) is None:
        return None
    refused = {
        f"rank {trainer.global_rank} of {trainer.world_size} where it is {ctx.rank} of "
        f"{ctx.world_size}; see docs/from/lightning.md for strategy, devices and num_nodes": (
            (trainer.global_rank, trainer.world_size) != (ctx.rank, ctx.world_size)
        ),
        f"{type(trainer.strategy).__name__}, a strategy other than DDP, or with a save_checkpoint "
        "of its own": not _is_ddp(trainer.strategy),
        "min_epochs or min_steps, before which it doesn't stop": bool(
            trainer.fit_loop.min_epochs or trainer.fit_loop.min_steps
        ),
        "AsyncCheckpointIO, which still writes when the checkpoint is committed": isinstance(
            trainer.strategy.checkpoint_io, AsyncCheckpointIO
        ),
    }
    refuse_options(refused)
    if ctx.world_size > 1 and not dist.is_initialized():  # in a script: Lightning does so in `fit`
        dist.init_process_group("nccl" if ctx.device.type == "cuda" else "gloo")
    refuse_other_ranks(ctx, "Lightning", "generators-*.pt")
    trainer.callbacks.append(_Callback(ctx))
    trainer.loggers = [*trainer.loggers, _Logger(ctx, trainer.default_root_dir)]
    return None if ctx.committed is None else str(ctx.committed / "trainer.ckpt")


def _is_ddp(strategy: Strategy) -> bool:
    """Return whether it saves as DDP does; those of DeepSpeed and XLA are DDP's subclasses too."""
    return (
        isinstance(strategy, DDPStrategy | SingleDeviceStrategy)
        and type(strategy).save_checkpoint is Strategy.save_checkpoint
    )


class _Logger(DummyLogger):  # type: ignore[misc]
    """Makes what is logged the run's metrics; means over all ranks."""

    def __init__(self, ctx: RankContext, folder: str) -> None:
        super().__init__()
        self._ctx, self._folder = ctx, folder

    @property
    def save_dir(self) -> str:
        """What `trainer.log_dir` is if this is the only logger: the same as with none."""
        return self._folder

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # noqa: ARG002 - theirs
        self._ctx.report(**{name: metrics[name] for name in metrics if name != "epoch"})


class _Callback(Checkpoint):  # type: ignore[misc]
    """Saves and stops when all ranks are to. A `Checkpoint`, so it comes after other callbacks."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx = ctx
        self._keeps_best = ctx.config.checkpoint.best_metric is not None
        self._step = 0  # batches after which an optimizer had made steps, over all attempts
        self._global_step = 0  # Lightning's, which with several optimizers counts each one's
        self._has_stepped = self._stops = False
        self._wants_save, self._saved_at = False, 0
        # It can load what it has resumed from.
        self._is_checked = ctx.committed is not None or ctx.rank > 0
        self._ended: str | None = None  # the run whose Trainer ended with the checkpoint
        self._file = f"generators-{ctx.rank}.pt"
        self._begun: Any = None  # the generators from which this epoch's order was drawn
        self._kept = None if ctx.committed is None else torch.load(ctx.committed / self._file)
        self._own_sigterm = signal.getsignal(signal.SIGTERM)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "ended": self._ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step, self._ended = state_dict["step"], state_dict["ended"]

    def on_train_start(self, trainer: Trainer, _module: Any) -> None:
        # Lightning's handler broadcasts, which hangs if not all ranks get the signal.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._own_sigterm)
        # Another run may train on from there.
        trainer.should_stop |= self._ended == self._ctx.config.run_id
        self._ended = None
        self._global_step = trainer.global_step
        self._step = self._saved_at = self._step or self._global_step
        _complete_restored_epoch(trainer.fit_loop)
        if self._kept is None:
            return
        loop, is_within = trainer.fit_loop, trainer.fit_loop.restarted_mid_epoch
        loaders, fetcher = _loaders(trainer), loop._data_fetcher  # noqa: SLF001
        refuse_other_sizes(self._kept if is_within else sizes_of(loaders), loaders)
        if not all(hasattr(each, "load_state_dict") for each in loaders):
            for each in loaders:  # Lightning does it later, when an order may have been drawn
                _set_sampler_epoch(each, trainer.current_epoch)
            self._begun = self._kept["begun" if is_within else "now"]
            if self._begun is not None:
                restore_generators(self._begun["global"])
                restore_own(loaders, self._begun["own"])
                iter(fetcher)
            # Lightning counts on from here, but its loader begins with the epoch's first batch.
            num_done = loop.epoch_loop.batch_progress.current.ready if is_within else 0
            for _ in range(num_done):
                next(fetcher)
            fetcher.fetched -= num_done
        if is_within:
            restore_generators(self._kept["now"]["global"])  # the batches advanced the own ones
            self._kept = None

    def on_train_epoch_start(self, trainer: Trainer, _module: Any) -> None:
        if self._kept is None and trainer.current_epoch > 0:
            self._begun = _capture(trainer)
        self._kept = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._has_stepped = trainer.global_step != self._global_step
        if not self._has_stepped:
            return  # gradients are being accumulated
        self._global_step, self._step = trainer.global_step, self._step + 1
        self._show(trainer)
        ends_epoch = trainer.current_epoch + 1 if trainer.is_last_batch else None
        due = self._ctx.due(self._step, ends_epoch=ends_epoch)
        self._stops = due.stop
        self._wants_save |= due.save or 0 <= trainer.max_steps <= self._global_step
        # Who resumes from before a validation doesn't repeat it.
        if not (_is_validated(trainer) or trainer.is_last_batch):
            self._save_if_wanted(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        if trainer.state.fn == TrainerFn.FITTING:
            self._show(trainer)
        else:  # `trainer.validate`, for which the number of steps may be unknown
            report_progress()

    def on_validation_end(self, trainer: Trainer, _module: Any) -> None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if not is_fitting or trainer.sanity_checking or not self._has_stepped:
            return
        self._wants_save |= self._keeps_best or trainer.should_stop
        if not trainer.is_last_batch:
            self._save_if_wanted(trainer)

    def on_train_epoch_end(self, trainer: Trainer, _module: Any) -> None:
        is_over = trainer.current_epoch + 1 == trainer.max_epochs or trainer.should_stop
        self._wants_save |= is_over
        # Gradients accumulated since the last step aren't saved: no step will use them.
        self._has_stepped |= is_over
        self._save_if_wanted(trainer)

    def _show(self, trainer: Trainer) -> None:
        total, epoch = trainer.estimated_stepping_batches, trainer.current_epoch + 1
        # For a loader without a length it is max_steps, which is -1 without a limit.
        num_steps = int(total) if 0 <= total < float("inf") else None
        self._ctx.progress(self._step, num_steps, epoch=epoch)

    def _save_if_wanted(self, trainer: Trainer) -> None:
        if self._wants_save and self._has_stepped and self._step > self._saved_at:
            self._wants_save, self._saved_at = False, self._step
            self._ended = self._ctx.config.run_id if trainer.should_stop else None
            self._save(trainer)
            self._ended = None
        # Only now: the save notes whether the Trainer itself is to end, and a Trainer that is to
        # stop validates after any step, for which no save is to wait.
        trainer.should_stop |= self._stops

    def _save(self, trainer: Trainer) -> None:
        folder = self._ctx.checkpoint_folder / f"step-{self._step}"
        folder.mkdir()
        path = folder / "trainer.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        if self._ctx.rank == 0 and not path.exists():
            plugin = type(trainer.strategy.checkpoint_io).__name__
            raise InvalidParamsError(_UNWRITTEN.format(plugin, path, self._step))
        if not self._is_checked:
            self._is_checked = True
            self._warn_of_unfit(trainer, path)
        state = {"begun": self._begun, "now": _capture(trainer), **sizes_of(_loaders(trainer))}
        torch.save(state, folder / self._file)
        self._ctx.commit(folder, step=self._step)
        shutil.rmtree(folder)

    def _warn_of_unfit(self, trainer: Trainer, path: Path) -> None:
        """Warn of a checkpoint that Lightning writes and then refuses to load, as it is made."""
        if type(trainer.strategy.checkpoint_io) is not TorchCheckpointIO:
            return  # a plugin of the user's may write it in any way
        if (reason := reason_against(path)) is not None:
            logger.warning(_UNFIT, self._step, reason)


def _loaders(trainer: Trainer) -> list[Any]:
    fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001 - nothing public leads to its iterator
    return list(fetcher.combined_loader.flattened)


def _capture(trainer: Trainer) -> dict[str, Any]:
    return {"global": capture_generators(), "own": capture_own(_loaders(trainer))}


def _complete_restored_epoch(loop: Any) -> None:
    """Begin the next epoch if the restored checkpoint is from the end of one.

    Lightning does so only without max_steps. With it, Lightning enters the finished epoch again,
    counts it twice and so ends too early, and without a validation trains on one more batch.
    """
    if loop.restarted_on_epoch_end:
        # Not `loop.restarting = False`: with max_steps that sets True.
        loop._restarting = loop.epoch_loop.restarting = False  # noqa: SLF001
        loop.reset()


def _is_validated(trainer: Trainer) -> bool:
    """Return whether a validation follows this batch; False if clocks decide, each rank's own."""
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        return False
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))  # noqa: SLF001
