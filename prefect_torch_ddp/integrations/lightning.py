"""Lightning's Trainer: `trainer.fit(model, data, ckpt_path=attach(trainer))`."""

import shutil
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.utilities.data import _set_sampler_epoch
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy

from prefect_torch_ddp.checkpoint.state.serial import capture_generators, restore_generators
from prefect_torch_ddp.integrations.refused import refuse_options
from prefect_torch_ddp.rank.context import RankContext, current_context


def attach(trainer: Trainer) -> str | None:
    """Have a Trainer's checkpoints committed; return the newest one, for `fit` to resume from.

    Returns None if there is none, or no RankContext, as under torchrun, where nothing changes.

    Raises:
        InvalidParamsError: the Trainer has an option with which a resumed training would differ or
            fail. The message names it.
    """
    if (ctx := current_context()) is None:
        return None
    refused = {
        f"rank {trainer.global_rank} of {trainer.world_size} where it is {ctx.rank} of "
        f"{ctx.world_size}; see docs/from/lightning.md for strategy, devices and num_nodes": (
            (trainer.global_rank, trainer.world_size) != (ctx.rank, ctx.world_size)
        ),
        "a strategy that isn't DDP": not isinstance(
            trainer.strategy, DDPStrategy | SingleDeviceStrategy
        ),
        "min_epochs or min_steps, before which it doesn't stop": bool(
            trainer.fit_loop.min_epochs or trainer.fit_loop.min_steps
        ),
    }
    refuse_options(refused)
    if ctx.world_size > 1 and not dist.is_initialized():  # in a script: Lightning does so in `fit`
        dist.init_process_group("nccl" if ctx.device.type == "cuda" else "gloo")
    trainer.callbacks.append(_Callback(ctx))
    trainer.loggers = [*trainer.loggers, _Logger(ctx)]
    return None if ctx.committed is None else str(ctx.committed / "trainer.ckpt")


class _Logger(DummyLogger):  # type: ignore[misc]
    """Makes what is logged the run's metrics; means over all ranks."""

    def __init__(self, ctx: RankContext) -> None:
        super().__init__()
        self._ctx = ctx

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # noqa: ARG002 - theirs
        self._ctx.report(**{name: metrics[name] for name in metrics if name != "epoch"})


class _Callback(Checkpoint):  # type: ignore[misc]
    """Saves and stops when all ranks are to. A `Checkpoint`, so it comes after other callbacks."""

    def __init__(self, ctx: RankContext) -> None:
        self._ctx, self._step, self._save_at_end = ctx, 0, False
        self._file = f"generators-{ctx.rank}.pt"
        self._begun: Any = None  # the generators from which this epoch's order was drawn
        found = None if ctx.committed is None else ctx.committed / self._file
        self._kept = torch.load(found) if found is not None and found.exists() else None
        self._own_sigterm = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, _module: Any) -> None:
        # Lightning's handler broadcasts, which hangs if not all ranks get the signal.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._own_sigterm)
        self._step = trainer.global_step
        if self._kept is None:
            return
        loop, is_within = trainer.fit_loop, trainer.fit_loop.restarted_mid_epoch
        fetcher = loop._data_fetcher  # noqa: SLF001 - nothing public leads to its iterator
        loaders = fetcher.combined_loader.flattened
        if not all(hasattr(each, "load_state_dict") for each in loaders):
            for each in loaders:  # Lightning does it later, when an order may have been drawn
                _set_sampler_epoch(each, trainer.current_epoch)
            self._begun = self._kept["begun" if is_within else "now"]
            if self._begun is not None:
                restore_generators(self._begun)
                iter(fetcher)
            # Lightning counts on from here, but its loader begins with the epoch's first batch.
            num_done = loop.epoch_loop.batch_progress.current.ready if is_within else 0
            for _ in range(num_done):
                next(fetcher)
            fetcher.fetched -= num_done
        if is_within:
            restore_generators(self._kept["now"])
            self._kept = None

    def on_train_epoch_start(self, trainer: Trainer, _module: Any) -> None:
        if self._kept is None and trainer.current_epoch > 0:
            self._begun = capture_generators()
        self._kept = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            return  # gradients are being accumulated
        self._step, epoch = trainer.global_step, trainer.current_epoch + 1
        self._show(trainer)
        due = self._ctx.due(self._step, ends_epoch=epoch if trainer.is_last_batch else None)
        trainer.should_stop |= due.stop
        self._save_at_end = due.save and trainer.is_last_batch
        if due.save and not trainer.is_last_batch:
            self._save(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._show(trainer)

    def on_train_epoch_end(self, trainer: Trainer, _module: Any) -> None:
        if self._save_at_end:
            self._save_at_end = False
            self._save(trainer)

    def _show(self, trainer: Trainer) -> None:
        total, epoch = trainer.estimated_stepping_batches, trainer.current_epoch + 1
        self._ctx.progress(self._step, int(total) if total < float("inf") else None, epoch=epoch)

    def _save(self, trainer: Trainer) -> None:
        folder = self._ctx.checkpoint_folder / f"step-{self._step}"
        folder.mkdir()
        trainer.save_checkpoint(folder / "trainer.ckpt", weights_only=False)
        torch.save({"begun": self._begun, "now": capture_generators()}, folder / self._file)
        self._ctx.commit(folder, step=self._step)
        shutil.rmtree(folder)
