"""Accelerate's loop: `for batch in attach(accelerator).batches(loader, epochs=3)`."""

import math
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, skip_first_batches
from accelerate.data_loader import DataLoaderShard
from accelerate.tracking import GeneralTracker
from torch.utils.data import BatchSampler, IterableDataset

from prefect_torch_ddp.checkpoint.state.serial import capture_generators, restore_generators
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.integrations.refused import refuse_options
from prefect_torch_ddp.rank.context import RankContext, current_context

_PLAIN = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


def attach(accelerator: Accelerator) -> "Loop":
    """Restore the newest commit into an Accelerator; return the loop that saves and resumes.

    Call it after `accelerator.prepare` and `init_trackers`. Without a RankContext, as under
    torchrun, the loop is the plain one.

    Raises:
        InvalidParamsError: the Accelerator has an option with which a resumed training would differ
            or fail; the message names it. Or the newest commit is of another number of ranks.
    """
    if (ctx := current_context()) is None:
        return Loop(accelerator, None)
    refused = {
        f"rank {accelerator.process_index} of {accelerator.num_processes} where it is {ctx.rank} "
        f"of {ctx.world_size}": (
            (accelerator.process_index, accelerator.num_processes) != (ctx.rank, ctx.world_size)
        ),
        f"{accelerator.distributed_type}, which isn't DDP": (
            accelerator.distributed_type not in _PLAIN
        ),
        "automatic_checkpoint_naming, which writes elsewhere": (
            accelerator.project_configuration.automatic_checkpoint_naming
        ),
    }
    refuse_options(refused)
    accelerator.trackers.append(_Tracker(ctx))
    return Loop(accelerator, ctx)


class Loop:
    """Goes through a prepared DataLoader for several epochs, and saves, resumes and stops."""

    def __init__(self, accelerator: Accelerator, ctx: RankContext | None) -> None:
        self._accelerator, self._ctx = accelerator, ctx
        self.step = 0
        """Optimizer steps that are finished, over all attempts."""
        self._kept: Any = None
        if ctx is not None and ctx.committed is not None:
            size = torch.load(ctx.committed / "loop-0.pt")["world_size"]
            if size != ctx.world_size:
                msg = (
                    f"the commit is of {size} ranks and this gang has {ctx.world_size}: Accelerate "
                    f"would give them other batches; continue on {size} ranks"
                )
                raise InvalidParamsError(msg)
            accelerator.load_state(str(ctx.committed))
            self._kept = torch.load(ctx.committed / f"loop-{ctx.rank}.pt")
            self.step = self._kept["step"]

    def batches(self, loader: Any, *, epochs: int) -> Iterator[Any]:
        """Yield the batches of all epochs; after a resume, those that are left.

        The loop's body trains on a batch. After a body that made an optimizer step, this iterator
        saves by `accelerator.save_state` if a checkpoint is due, and ends if all ranks are to stop.

        Args:
            loader: a DataLoader that `accelerator.prepare` returned, with a dataset that has a
                length.
            epochs: number of passes over the DataLoader, over all attempts.

        Raises:
            InvalidParamsError: the DataLoader can't be resumed within an epoch. The message says
                why.
        """
        if self._ctx is None:
            return (batch for _ in range(epochs) for batch in loader)
        refuse_options(
            {
                "a DataLoader that it didn't prepare": not isinstance(loader, DataLoaderShard),
                "an IterableDataset": isinstance(loader.dataset, IterableDataset),
                "use_stateful_dataloader": getattr(loader, "use_stateful_dataloader", False),
            }
        )
        return self._batches(self._ctx, loader, epochs)

    def _batches(self, ctx: RankContext, loader: DataLoaderShard, epochs: int) -> Iterator[Any]:
        num_steps = math.ceil(len(loader) / self._accelerator.gradient_accumulation_steps)
        for epoch in range(self._kept["epoch"] if self._kept else 0, epochs):
            begun, num_done, source = self._begin(loader, epoch)
            for batch in source:
                if self._kept:
                    if num_done:  # iterating has drawn numbers
                        restore_generators(self._kept["now"]["generators"])
                    self._kept = None
                yield batch
                num_done += 1
                if not self._accelerator.sync_gradients:
                    continue  # gradients are being accumulated
                self.step += 1
                is_last = self._accelerator.gradient_state.end_of_dataloader
                ctx.progress(self.step, num_steps * epochs, epoch=epoch + 1)
                due = ctx.due(self.step, ends_epoch=epoch + 1 if is_last else None)
                if due.save:
                    position = (epoch + 1, 0) if is_last else (epoch, num_done)
                    self._save(position, begun, _capture(loader))
                if due.stop:
                    return

    def _begin(self, loader: DataLoaderShard, epoch: int) -> tuple[Any, int, DataLoaderShard]:
        """Return what the epoch's order is drawn from, how many batches are done, and the rest."""
        loader.iteration = epoch
        num_done = self._kept["num_done"] if self._kept else 0
        if self._kept:
            _restore(loader, self._kept["begun" if num_done else "now"])
        begun = _capture(loader)
        return begun, num_done, skip_first_batches(loader, num_done) if num_done else loader

    def _save(self, position: tuple[int, int], begun: Any, now: Any) -> None:
        assert self._ctx is not None
        epoch, num_done = position
        rank, folder = self._ctx.rank, self._ctx.checkpoint_folder / f"step-{self.step}"
        self._accelerator.save_state(str(folder))
        size = self._ctx.world_size
        state = {"epoch": epoch, "num_done": num_done, "step": self.step, "world_size": size}
        torch.save({**state, "begun": begun, "now": now}, folder / f"loop-{rank}.pt")
        own = [f"random_states_{rank}.pkl", f"loop-{rank}.pt"]
        self._ctx.commit(folder, step=self.step, files=own if rank else None)
        shutil.rmtree(folder)


def _sampler(loader: DataLoaderShard) -> Any:
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(batches, "batch_sampler"):  # each rank's share is cut out of another's
        batches = batches.batch_sampler
    return getattr(batches, "sampler", None)


def _capture(loader: DataLoaderShard) -> dict[str, Any]:
    """Return all generators' states, and what the order of the samples is drawn from."""
    sampler = _sampler(loader)
    generator = getattr(sampler, "generator", None)
    return {
        "generators": capture_generators(),
        "seed": getattr(sampler, "initial_seed", None),
        "order": None if generator is None else generator.get_state(),
    }


def _restore(loader: DataLoaderShard, kept: dict[str, Any]) -> None:
    sampler = _sampler(loader)
    if kept["seed"] is not None:  # Accelerate's own sampler, which draws by seed and epoch
        sampler.initial_seed = kept["seed"]
    elif kept["order"] is not None:
        sampler.generator.set_state(kept["order"])
    restore_generators(kept["generators"])


class _Tracker(GeneralTracker):  # type: ignore[misc]
    """Makes what `accelerator.log` is given the run's metrics; means over all ranks."""

    name = "prefect_torch_ddp"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, ctx: RankContext) -> None:
        super().__init__()
        self._ctx = ctx

    @property
    def tracker(self) -> RankContext:
        return self._ctx

    def log(self, values: dict[str, Any], step: Any = None, **_: Any) -> None:  # noqa: ARG002
        self._ctx.report(**values)
