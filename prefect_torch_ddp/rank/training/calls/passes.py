"""Passes over a loader that isn't ours, on one rank: how they begin, resume, and are saved."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prefect_torch_ddp.data.fetching import generators_kept
from prefect_torch_ddp.errors import CheckpointError, InvalidParamsError

logger = logging.getLogger(__name__)

_END = object()
_STATEFUL = ("state_dict", "load_state_dict")


class Passes:
    """Goes over an iterable, again and again, and knows where it is.

    Its state is tracked as this rank's own: the number of the pass, and what the iterable itself
    says of its place, if it has `state_dict` and `load_state_dict`.
    """

    def __init__(self, iterable: Iterable[Any], *, begins_anew: bool = False) -> None:
        """Begin no pass yet.

        Args:
            iterable: a loader of others, a dataset, a list, a generator.
            begins_anew: whether it begins from the start if another number of ranks saved it.
        """
        self.iterable = iterable
        self.begins_anew = begins_anew
        self.has_state = all(callable(getattr(iterable, name, None)) for name in _STATEFUL)
        self.saved_by = 0
        """How many ranks saved the states in the checkpoint, none of which is this one's."""
        self._num_begun = 0
        self._iterator: Iterator[Any] | None = None
        self._left_at: Any = None
        """The iterable's state, if no pass is under way: as it was loaded, or left."""
        self._is_restored = False

    @property
    def kind(self) -> str:
        """The iterable's class, for people."""
        return type(self.iterable).__name__

    @property
    def is_kept(self) -> bool:
        """Whether there is anything to save."""
        return self.has_state or bool(self._with_epochs())

    def state_dict(self) -> dict[str, Any]:
        """Return the place of this rank."""
        under_way = self._iterator is not None
        return {
            "num_begun": self._num_begun,
            "iterable": self._position() if under_way else self._left_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a place over; the iterable gets its own when a call begins."""
        self._num_begun, self._left_at = state["num_begun"], state["iterable"]
        self._iterator, self._is_restored = None, True

    def begin(self, *, continues: bool) -> None:
        """Begin a call: a new pass, or the one that the checkpoint was made in.

        Raises:
            CheckpointError: the checkpoint's states are those of another number of ranks.
        """
        if continues and self.saved_by and self.has_state and not self.begins_anew:
            msg = (
                f"ctx.steps iterates over a {self.kind}, whose position was saved by each of "
                f"{self.saved_by} ranks, and the number of ranks has changed. Resume on "
                f"{self.saved_by} ranks, or start the data from the beginning with "
                "ctx.steps(..., on_other_world_size='begin')"
            )
            raise CheckpointError(msg)
        had_position, self._is_restored = self._is_restored and self._left_at is not None, False
        if had_position:
            # Also if the call begins a new pass: what its sampler draws follows the last one.
            with generators_kept():  # the checkpoint's are those after the pass had begun
                self._set_epoch(self._num_begun - 1)
                self.iterable.load_state_dict(self._left_at)  # type: ignore[attr-defined]
                self._iterator = iter(self.iterable)
        elif continues:
            logger.warning(
                "the training resumes at its step, but the %s that ctx.steps iterates over has no "
                "state in the checkpoint: the data start from the beginning",
                self.kind,
            )
        if not (had_position and continues):
            self._begin_pass()

    def take(self) -> Any:
        """Return the next batch, of the next pass if one is over.

        Raises:
            InvalidParamsError: a pass has no batch at all.
        """
        batch = next(self._now, _END)
        if batch is _END:
            self._begin_pass()
            batch = next(self._now, _END)
        if batch is _END:
            msg = (
                f"the {self.kind} that ctx.steps iterates over has no batch in a new pass: it is "
                "empty, or an iterator, which can't begin again. Give ctx.steps an iterable that "
                "can, such as a DataLoader or a list, or a smaller total"
            )
            raise InvalidParamsError(msg)
        return batch

    def leave(self) -> None:
        """End the pass under way; its place stays."""
        if self._iterator is not None:
            self._left_at = self._position()
            self._iterator = None

    def warn_of_no_state(self) -> None:
        """Say that a resumed training won't be exact, unless the iterable knows its place."""
        if not self.has_state:
            logger.warning(
                "ctx.steps iterates over a %s without state_dict and load_state_dict: a resumed "
                "training continues at its step, but the data begin from the start, so that some "
                "come again and others don't come. Use ctx.loader, or a loader that knows its "
                "place, such as torchdata's StatefulDataLoader",
                self.kind,
            )

    @property
    def _now(self) -> Iterator[Any]:
        assert self._iterator is not None
        return self._iterator

    def _begin_pass(self) -> None:
        self._iterator = None  # its worker processes end before others start
        self._set_epoch(self._num_begun)
        self._num_begun += 1
        self._iterator = iter(self.iterable)

    def _position(self) -> Any:
        return self.iterable.state_dict() if self.has_state else None  # type: ignore[attr-defined]

    def _set_epoch(self, epoch: int) -> None:
        """Choose the order of a pass, as a loop over epochs does with DistributedSampler's."""
        for part in self._with_epochs():
            part.set_epoch(epoch)

    def _with_epochs(self) -> list[Any]:
        batches = getattr(self.iterable, "batch_sampler", None)
        names = ("sampler", "batch_sampler", "dataset")
        parts = [self.iterable, *(getattr(self.iterable, name, None) for name in names)]
        parts.append(getattr(batches, "sampler", None))
        found = {id(part): part for part in parts if callable(getattr(part, "set_epoch", None))}
        return list(found.values())
