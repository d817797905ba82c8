"""A Trainer's place in its data: what the order of an epoch is drawn from, and how much there is.

Transformers keeps only the number of steps, and restores generators after an order is drawn.
"""

import io
import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from prefect_torch_ddp.checkpoint.state.serial import capture_generators, restore_generators
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.integrations.held_generators import capture_own, restore_own
from prefect_torch_ddp.integrations.refused import batch_size_of
from prefect_torch_ddp.rank.context import RankContext

_MAX_WATCHED = 8
"""Reads an epoch of which it is noted whether they draw random numbers: a few show it."""
_DRAWS = (
    "the dataset or the collator draws random numbers as samples are read: in the epoch that "
    "continues here, Transformers gives it other ones than in an uninterrupted training. Only "
    "checkpoints at the end of an epoch, CheckpointParams(every_epochs=1), are exact with it"
)

logger = logging.getLogger(__name__)


class DataPosition:
    """Saves, with each checkpoint, what the rest of an epoch needs; restores it on resume."""

    def __init__(self, ctx: RankContext, trainer: Trainer) -> None:
        self._trainer = trainer
        self.file = f"data_{ctx.rank}.pth"
        self._kept: Any = None  # until the first epoch begins
        # A commit of the user's own, without `attach`, has no such file.
        if ctx.committed is not None and (ctx.committed / self.file).exists():
            self._kept = torch.load(ctx.committed / self.file)
        self._begun: Any = None  # the generators from which this epoch's order was drawn
        self._loader: Any = None
        self._num_reads = 0  # in this epoch; the first one draws the order too
        self._draws = False
        read = trainer.get_batch_samples

        def watched(*given: Any) -> Any:
            before = self._drawn_from() if 0 < self._num_reads < _MAX_WATCHED else None
            got = read(*given)
            self._draws |= before is not None and self._drawn_from() != before
            self._num_reads += 1
            return got

        trainer.get_batch_samples = watched

    def refuse_other_sizes(self, loader: Any) -> None:
        """Compare the data with those of the checkpoint.

        Raises:
            InvalidParamsError: there are more or fewer samples, or steps an epoch, or a rank gets
                more or fewer samples a step.
        """
        if self._kept is None:
            return
        here = self._sizes_of(loader)
        there = {name: self._kept[name] for name in here}
        if there != here:
            msg = (
                f"the commit is of a training on {_said(**there)}, and here are {_said(**here)}: "
                "Transformers computes the place in the data from the step, so some samples would "
                "be used twice or never. Continue with the former dataset and batch size, or start "
                "another run and give it only the weights of this one"
            )
            raise InvalidParamsError(msg)

    def begin_epoch(self, given: dict[str, Any]) -> None:
        """Put the generators back to where this epoch's order was drawn from; note them.

        Args:
            given: the arguments of the Trainer's `_run_epoch`.
        """
        self._loader, self._num_reads = given["train_dataloader"], 0
        kept, self._kept = self._kept, None
        folder, parts = given["resume_from_checkpoint"], self._parts()
        if kept is not None and folder is not None:
            if given["steps_trained_in_current_epoch"] > 0:
                self._begun, self._draws = kept["begun"], kept["draws"]
                restore_generators(self._begun["global"])
                restore_own(parts, self._begun["own"])
                _set_epoch(self._loader, given["epoch"])
                if self._draws:
                    logger.warning(_DRAWS)
                return
            self._trainer._load_rng_state(folder)  # noqa: SLF001 - as it does itself, but later
            restore_own(parts, kept["own"])
        self._begun = {"global": capture_generators(), "own": capture_own(parts)}

    def save(self, folder: Path) -> None:
        """Write this rank's file into a checkpoint."""
        state = {
            **self._sizes_of(self._loader),
            "begun": self._begun,
            "own": capture_own(self._parts()),
            "draws": self._draws,
        }
        torch.save(state, folder / self.file)

    def _sizes_of(self, loader: Any) -> dict[str, Any]:
        data, accumulated = loader.dataset, self._trainer.args.gradient_accumulation_steps
        num_steps = math.ceil(len(loader) / accumulated) if has_length(loader) else None
        batch_size = batch_size_of(loader)
        return {
            "sizes": (len(data) if has_length(data) else None, num_steps),
            "step_samples": None if batch_size is None else batch_size * accumulated,
        }

    def _parts(self) -> list[Any]:
        """Return what may hold generators; Accelerate's own sampler draws by seed and epoch."""
        loader = self._loader
        sampler: Any = getattr(loader, "batch_sampler", None)
        while hasattr(sampler, "batch_sampler"):  # each rank's share is cut out of another's
            sampler = sampler.batch_sampler
        is_seeded = hasattr(getattr(sampler, "sampler", None), "initial_seed")
        ordering = loader.dataset if is_seeded else getattr(loader, "base_dataloader", loader)
        return [ordering, self._trainer.data_collator]

    def _drawn_from(self) -> bytes:
        """Return the states of what reading a sample may draw from."""
        reading = [self._trainer.data_collator]
        if not isinstance(self._loader.dataset, IterableDataset):  # one is read from its start
            reading.append(self._loader.dataset)
        states = io.BytesIO()
        torch.save([capture_generators(), capture_own(reading)], states)
        return states.getvalue()


def _said(sizes: tuple[int | None, int | None], step_samples: int | None) -> str:
    counts = " in ".join(
        f"{'an unknown number of' if size is None else size} {what}"
        for size, what in zip(sizes, ("samples", "steps an epoch"), strict=True)
    )
    return counts if step_samples is None else f"{counts}, each rank {step_samples} a step"


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell samplers the epoch; the Trainer doesn't reach all of them where it skips batches."""
    underlying: Any = getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)
    for each in (loader, underlying):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
