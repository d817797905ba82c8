"""What a call of `ctx.steps` goes through: epochs of a loader, or a number of steps."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.data.sampler import (
    WITHOUT_DATA,
    BatchShare,
    GlobalBatches,
    whole_number,
)
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.training.calls.passes import Passes
from prefect_torch_ddp.rank.training.loop_progress import LoopProgress, Position

logger = logging.getLogger(__name__)


class Plan(Protocol):
    """What the loop asks of a call: equal on all ranks, but for the batches."""

    @property
    def batches(self) -> GlobalBatches | None:
        """The global batches; None: each rank has its own data, or none."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the arguments that are equal on all ranks; can be written as JSON."""
        ...

    def has_more(self, position: Position) -> bool:
        """Tell whether the call that is at this position has steps left."""
        ...

    def enter(self, progress: LoopProgress, loop: int) -> None:
        """Move the position to where this call begins, or resumes."""
        ...

    def begin(self, progress: LoopProgress) -> float:
        """Note how long the call is; return the steps that are left of it."""
        ...

    def walk(
        self, progress: LoopProgress, compare: Callable[[int, str], None]
    ) -> Iterator[tuple[Any, BatchShare]]:
        """Yield each batch that is left, with this rank's share; the steps move the position.

        Args:
            progress: has the position.
            compare: refuses the order of an epoch that another rank has otherwise.
        """
        ...


@dataclass(frozen=True)
class OverLoader:
    """Epochs of a loader of ours, at most so many steps of them."""

    loader: RankLoader
    epochs: float
    total: float = math.inf

    @property
    def batches(self) -> GlobalBatches:
        """The loader's."""
        return self.loader.batches

    def describe(self) -> dict[str, Any]:
        """Return the loader's arguments, and the length."""
        lengths = {"epochs": self.epochs, "total": self.total}
        return {
            "global_batch_size": self.batches.global_batch_size,
            "order": self.loader.order,
            "drop_last": self.batches.drop_last,
            **{name: value for name, value in lengths.items() if value < math.inf},
        }

    def has_more(self, position: Position) -> bool:
        """Tell whether epochs and steps are left."""
        return position.loop_epoch < self.epochs and position.loop_step < self.total

    def enter(self, progress: LoopProgress, loop: int) -> None:
        """Enter the call."""
        loader = self.loader
        progress.enter_call(loop, loader.order_of, loader.global_batch_size, len(loader))

    def begin(self, progress: LoopProgress) -> float:
        """Return how many steps are left; warn if one batch has room for more than the dataset."""
        size, num_samples = self.batches.global_batch_size, self.batches.num_places
        if size > num_samples and self.loader.rank == 0 and progress.step == 0:
            logger.warning(
                "global_batch_size is %d and the dataset has %d samples: each epoch is a single "
                "step on all of them; choose a global_batch_size below %d for more steps",
                *(size, num_samples, num_samples),
            )
        if self.total < math.inf:
            return progress.begin_counted(self.total)
        return progress.begin_loop(self.epochs, len(self.loader))

    def walk(
        self, progress: LoopProgress, compare: Callable[[int, str], None]
    ) -> Iterator[tuple[Any, BatchShare]]:
        """Yield the batches of one epoch after the other."""
        while self.has_more(progress.position):
            order = self.loader.order_of(progress.position.epoch)
            if self.batches.own_order is not None:  # else it was compared when the call began
                compare(progress.position.epoch, order)
            progress.begin_epoch(order)
            at = progress.position
            for batch, share in self.loader.lockstep(at.epoch, at.batch):
                yield batch, share
                if progress.position.loop_step >= self.total:
                    return  # before it loads another one
            progress.end_epoch()


@dataclass(frozen=True)
class Counted:
    """A number of steps over a loader of others; or their data are the body's business."""

    total: float
    passes: Passes | None = None
    batches: None = None

    def describe(self) -> dict[str, Any]:
        """Return the length, and whether there is a loader."""
        return {"a loader": self.passes is not None, "total": self.total}

    def has_more(self, position: Position) -> bool:
        """Tell whether steps are left."""
        return position.loop_step < self.total

    def enter(self, progress: LoopProgress, loop: int) -> None:
        """Enter the call."""
        progress.enter_call_without_epochs(loop)

    def begin(self, progress: LoopProgress) -> float:
        """Return how many steps are left."""
        return progress.begin_counted(self.total)

    def walk(
        self, progress: LoopProgress, _compare: Callable[[int, str], None]
    ) -> Iterator[tuple[Any, BatchShare]]:
        """Yield the number of each step, or the loader's batch."""
        passes, num_done = self.passes, progress.position.loop_step
        if passes is not None and num_done < self.total:
            passes.begin(continues=num_done > 0)
        try:
            while self.has_more(progress.position):
                yield progress.step + 1 if passes is None else passes.take(), WITHOUT_DATA
        finally:
            if passes is not None:
                passes.leave()


def plan_for(
    config: RankConfig,
    loader: object,
    epochs: Any,
    total: Any,
    passes_over: Callable[[Iterable[Any]], Passes],
) -> Plan:
    """Check the arguments of `ctx.steps`; `passes_over` tracks where it is in a loader of others.

    Raises:
        InvalidParamsError: they don't go together, or can't be kept right; names them.
    """
    if (epochs is None) == (total is None):
        msg = (
            "ctx.steps takes epochs=... of a loader, or total=..., a number of steps: give one of "
            f"the two, not {'both' if total is not None else 'none'}"
        )
        raise InvalidParamsError(msg)
    if total is not None:
        total = _count("total", total)
    if isinstance(loader, RankLoader):
        if total is not None:
            return OverLoader(loader, math.inf, total)
        return OverLoader(loader, _count("epochs", epochs))
    if total is None or not (loader is None or isinstance(loader, Iterable)):
        takes = "ctx.steps takes a loader from ctx.loader(dataset, global_batch_size=...)"
        others = "any other iterable goes with total=..., a number of steps"
        msg = f"{takes}, not a {type(loader).__name__}; {others}"
        raise InvalidParamsError(msg)
    _refuse_without_loader(config)
    return Counted(total, None if loader is None else passes_over(loader))


def _count(name: str, value: Any) -> float:
    is_endless = value == math.inf  # until the loop is left
    return math.inf if is_endless else whole_number(name, value, 0)


def _refuse_without_loader(config: RankConfig) -> None:
    """Refuse a run that promises of each sample what only our loader can keep."""
    promise = "determinism='elastic' cuts" if config.is_elastic else "ledger=True records"
    if config.is_elastic or (config.ledger and config.trains):
        msg = (
            f"{promise} the global batches of ctx.loader, and this call of ctx.steps has no such "
            "loader: give it one, or leave that option out"
        )
        raise InvalidParamsError(msg)
