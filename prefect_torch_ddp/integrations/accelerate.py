"""Accelerate's loop: `for batch in attach(accelerator).batches(loader, epochs=3)`."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, skip_first_batches
from accelerate.data_loader import DataLoaderShard
from accelerate.tracking import GeneralTracker
from torch.utils.data import BatchSampler, IterableDataset

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

_OF_DDP = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
_NO_STEP = (
    "no optimizer made a step in epoch {}: use one that accelerator.prepare returned, and don't "
    "decide by loop.step when to make a step, since only steps increase it; accumulate with "
    "accelerator.accumulate, or count batches"
)


def attach(accelerator: Accelerator) -> "Loop":
    """Restore the newest commit into an Accelerator; return the loop that saves and resumes.

    Call it after `accelerator.prepare` and `init_trackers`. Without a RankContext, as under
    torchrun, the loop is the plain one.

    Raises:
        InvalidParamsError: the Accelerator has an option with which a resumed training would differ
            or fail; the message names it. Or the newest commit is of another number of ranks, or
            loading a state of it could run code.
    """
    if (ctx := current_context()) is None:
        return Loop(accelerator, None)
    refused = {
        f"rank {accelerator.process_index} of {accelerator.num_processes} where it is {ctx.rank} "
        f"of {ctx.world_size}": (
            (accelerator.process_index, accelerator.num_processes) != (ctx.rank, ctx.world_size)
        ),
        f"{accelerator.distributed_type}, which isn't DDP": (
            accelerator.distributed_type not in _OF_DDP
        ),
        "automatic_checkpoint_naming, which writes elsewhere": (
            accelerator.project_configuration.automatic_checkpoint_naming
        ),
    }
    refuse_options(refused)
    loop = Loop(accelerator, ctx)
    accelerator.trackers.append(_Tracker(ctx, loop))
    return loop


class Loop:
    """Goes through a prepared DataLoader for several epochs, and saves, resumes and stops."""

    def __init__(self, accelerator: Accelerator, ctx: RankContext | None) -> None:
        self._accelerator, self._ctx = accelerator, ctx
        self.step = 0
        """Optimizer steps that are finished, over all attempts."""
        self.epoch = 0
        """The current epoch, from 1, over all calls of `batches` and all attempts."""
        self.epoch_ended = False
        """Whether the current batch is the last one of its epoch."""
        self._num_epochs = 0  # of all calls of `batches`
        self._has_stepped = self._skips_steps = self._has_stopped = False
        # Nothing public has them.
        self._optimizers = accelerator._optimizers  # noqa: SLF001
        self._loaders = accelerator._dataloaders  # noqa: SLF001
        for optimizer in self._optimizers:
            self._note_steps(optimizer)
        self._kept: Any = None
        if ctx is not None and ctx.committed is not None:
            refuse_other_ranks(ctx, "Accelerate", "loop-*.pt")
            self._load_state(ctx.committed)
            self._kept = torch.load(ctx.committed / f"loop-{ctx.rank}.pt")
            self.step, self._skips_steps = self._kept["step"], self._kept["skips_steps"]

    @property
    def is_behind(self) -> bool:
        """Whether a resumed program hasn't come to the place of its commit yet."""
        return self._kept is not None

    def batches(self, loader: Any, *, epochs: int) -> Iterator[Any]:
        """Yield the batches of all epochs; after a resume, those that are left.

        The loop's body trains on a batch. After a body in which an optimizer made a step, this
        iterator saves by `accelerator.save_state` if a checkpoint is due, and ends if all ranks are
        to stop. What the body does once `epoch_ended` is true, such as a validation, belongs to the
        step and isn't repeated.

        A second call continues the numbers of steps and epochs. On resume, finished calls yield
        nothing and the code after them runs again. What it logs is left out, and what it did to
        the model and all that `save_state` saves is undone. After a stop, later calls yield
        nothing.

        Args:
            loader: a DataLoader that `accelerator.prepare` returned, with a dataset that has a
                length.
            epochs: number of passes over the DataLoader in this call, over all attempts.

        Raises:
            InvalidParamsError: the DataLoader can't be resumed within an epoch, or has other
                numbers of samples or batches, or another batch size, than the epoch that is to be
                finished; or no prepared optimizer makes steps. The message says why.
        """
        first = self._num_epochs
        self._num_epochs += epochs
        if self._ctx is None:
            return self._without_context(loader, range(first, self._num_epochs))
        refuse_options(
            {
                "a DataLoader that it didn't prepare": not isinstance(loader, DataLoaderShard),
                "an IterableDataset": isinstance(getattr(loader, "dataset", None), IterableDataset),
                "use_stateful_dataloader": getattr(loader, "use_stateful_dataloader", False),
                "no optimizer that it prepared before attach": not self._optimizers,
            }
        )
        return self._batches(self._ctx, loader, first, self._num_epochs)

    def _without_context(self, loader: Any, epochs: range) -> Iterator[Any]:
        for epoch in epochs:
            for batch in loader:
                yield from self._body(batch, epoch, loader)

    def _body(self, batch: Any, epoch: int, source: Any) -> Iterator[Any]:
        """Yield a batch; count the step that the body made."""
        self.epoch, self.epoch_ended = epoch + 1, getattr(source, "end_of_dataloader", False)
        self._has_stepped = False
        yield batch
        self.step += self._has_stepped

    def _batches(
        self, ctx: RankContext, loader: DataLoaderShard, first: int, end: int
    ) -> Iterator[Any]:
        ended = None  # the epoch that has ended since the last step
        for epoch in range(self._enter(ctx, first, end), end):
            begun, num_done, source = self._begin(loader, epoch)
            has_stepped = num_done > 0  # in this epoch
            for batch in source:
                if self._kept and num_done:  # iterating has drawn numbers
                    restore_generators(self._kept["now"]["generators"])
                self._kept = None
                total = self._total(len(loader), first, end - epoch, num_done)
                ctx.progress(self.step + 1, total, epoch=epoch + 1)
                yield from self._body(batch, epoch, source)
                num_done += 1
                ended = epoch + 1 if self.epoch_ended else ended
                if not self._has_stepped:  # gradients are being accumulated
                    self._skips_steps |= self._accelerator.sync_gradients
                    continue
                has_stepped = True
                due = ctx.due(self.step, ends_epoch=ended)
                ended, self._has_stopped = None, due.stop
                if due.save:
                    self._save((epoch + 1, 0) if self.epoch_ended else (epoch, num_done), begun)
                if due.stop:
                    return
            if self._skips_steps and not has_stepped:
                raise InvalidParamsError(_NO_STEP.format(epoch + 1))

    def _enter(self, ctx: RankContext, first: int, end: int) -> int:
        """Return the epoch with which a call begins; its end if it has nothing left."""
        if self._has_stopped:
            return end
        if self._kept is None:
            return first
        epoch, num_done = self._kept["epoch"], self._kept["num_done"]
        if (epoch, num_done) > (end, 0):
            return end
        if first > 0:  # the code after finished calls has run again
            assert ctx.committed is not None
            self._load_state(ctx.committed)
        if epoch == end:  # the commit is of the call's last step: what comes next wasn't done
            self._restore(self._kept["now"])
            self._kept = None
            ctx.progress(self.step, epoch=epoch)
        return int(epoch)

    def _begin(self, loader: DataLoaderShard, epoch: int) -> tuple[Any, int, DataLoaderShard]:
        """Return what the epoch's order is drawn from, how many batches are done, and the rest."""
        num_done = self._kept["num_done"] if self._kept else 0
        if self._kept:
            self._restore(self._kept["now"])
            if num_done:
                begun = self._kept["begun"]
                refuse_other_sizes(begun, [loader])
                self._restore(begun, only=loader)
        loader.iteration = epoch
        begun = {**self._capture(), **sizes_of([loader])}
        if not num_done:
            return begun, 0, loader
        left = skip_first_batches(loader, num_done)
        left.set_epoch = loader.set_epoch  # its own doesn't reach each sampler that loader's does
        return begun, num_done, left

    def _total(self, num_batches: int, first: int, num_epochs: int, num_done: int) -> int | None:
        """Return the number of all steps; None: later calls or accumulation by hand change it."""
        if first > 0 or self._skips_steps:
            return None
        size: int = self._accelerator.gradient_accumulation_steps
        return self.step + num_epochs * math.ceil(num_batches / size) - num_done // size

    def _note_steps(self, optimizer: Any) -> None:
        """Have an optimizer tell when it makes a step.

        A hook of torch's would miss a step that a GradScaler skips, but it ends an accumulation.
        """
        step = optimizer.step

        def noted(_: Any, *args: Any, **kwargs: Any) -> Any:
            self._has_stepped |= self._accelerator.sync_gradients
            return step(*args, **kwargs)

        optimizer.step = MethodType(noted, optimizer)  # torch's schedulers need a method

    def _capture(self) -> dict[str, Any]:
        """Return all generators' states, and what each loader's order is drawn from."""
        return {
            "generators": capture_generators(),
            "orders": [_order(loader) for loader in self._loaders],
        }

    def _restore(self, kept: dict[str, Any], only: DataLoaderShard | None = None) -> None:
        for loader, (iteration, seed, own) in zip(self._loaders, kept["orders"], strict=False):
            if only is not None and loader is not only:
                continue
            loader.iteration = iteration
            if seed is not None:  # Accelerate's own sampler, which draws by seed and epoch
                _sampler(loader).initial_seed = seed
            else:
                restore_own([loader.base_dataloader], own)
        restore_generators(kept["generators"])

    def _load_state(self, folder: Path) -> None:
        self._refuse_pickles(folder)
        self._accelerator.load_state(str(folder))

    def _refuse_pickles(self, folder: Path) -> None:
        """Raise InvalidParamsError if the state of a registered object isn't only data.

        Accelerate unpickles these states, so whoever can write to the storage could run code.
        """
        for index, item in enumerate(self._accelerator._custom_objects):  # noqa: SLF001
            path = folder / f"custom_checkpoint_{index}.pkl"  # rank 0 writes it
            if path.exists() and (reason := reason_against(path)) is not None:
                msg = (
                    f"{path.name}, the state of the {type(item).__qualname__} given to "
                    f"register_for_checkpointing, isn't only data ({reason}), so that loading it "
                    "could run code: its state_dict() should return tensors, numbers, texts, lists "
                    "and plain dicts, and NumPy arrays as tensors"
                )
                raise InvalidParamsError(msg)

    def _save(self, position: tuple[int, int], begun: Any) -> None:
        assert self._ctx is not None
        now = self._capture()
        epoch, num_done = position
        rank, folder = self._ctx.rank, self._ctx.checkpoint_folder / f"step-{self.step}"
        self._accelerator.save_state(str(folder))
        self._refuse_pickles(folder)
        state = {
            "step": self.step,
            "epoch": epoch,
            "num_done": num_done,
            "skips_steps": self._skips_steps,
            "begun": begun,
            "now": now,
        }
        torch.save(state, folder / f"loop-{rank}.pt")
        own = [f"random_states_{rank}.pkl", f"loop-{rank}.pt"]
        self._ctx.commit(folder, step=self.step, files=own if rank else None)
        shutil.rmtree(folder)


def _sampler(loader: Any) -> Any:
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # each rank's share is cut out of another's
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)


def _order(loader: Any) -> tuple[int, Any, Any]:
    seed = getattr(_sampler(loader), "initial_seed", None)
    return loader.iteration, seed, capture_own([loader.base_dataloader])


class _Tracker(GeneralTracker):  # type: ignore[misc]
    """Makes what `accelerator.log` is given the run's metrics; it calls this on rank 0 alone."""

    name = "prefect_torch_ddp"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, ctx: RankContext, loop: Loop) -> None:
        super().__init__()
        self._ctx, self._loop = ctx, loop

    @property
    def tracker(self) -> RankContext:
        return self._ctx

    def log(self, values: dict[str, Any], step: Any = None, **_: Any) -> None:  # noqa: ARG002
        if not self._loop.is_behind:  # it is on record, from the weights of that time
            self._ctx.report(**dict(_numbers(values)))


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the metrics among what is logged: Accelerate's trackers take dicts and texts too."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers({f"{name}/{inner}": each for inner, each in value.items()})
        elif not isinstance(value, str):
            yield name, value
