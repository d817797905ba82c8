"""Owns the look-ahead: the batch sampler tells who loads a batch which one comes next, and that
one is read meanwhile.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from torch.utils.data import Sampler

from prefect_torch_ddp.errors import InvalidParamsError

K = TypeVar("K")
B = TypeVar("B", bound=Sequence[Any])
V = TypeVar("V")


class Ahead(list[int]):
    """The indices of a batch, and those of the batches that the same process loads next.

    A list to everyone else.
    """

    following: tuple[list[int], ...] = ()


class LookAhead(Sampler[list[int]]):
    """A batch sampler that yields the batches of another one, each with those that the same
    loader process gets next.

        sampler = BatchSampler(RandomSampler(dataset), batch_size=64, drop_last=False) loader =
        DataLoader(dataset, batch_sampler=LookAhead(sampler, num_workers=2), num_workers=2)

    A DataLoader hands out batches in turn, so a process's next batch is `num_workers` further
    on. Datasets that don't look ahead see plain lists. `RankContext.loader` does so by itself.
    """

    def __init__(
        self, batch_sampler: Iterable[Sequence[int]], num_workers: int, depth: int = 1
    ) -> None:
        """Keep what it takes.

        Args:
            batch_sampler: yields lists of indices.
            num_workers: the DataLoader's.
            depth: how many batches ahead are read; each is in memory, undecoded.

        Raises:
            InvalidParamsError: a number can't be.
        """
        if num_workers < 0 or depth < 1:
            msg = f"num_workers is {num_workers} and depth {depth}; give the DataLoader's num_workers, and a depth of at least 1"
            raise InvalidParamsError(msg)
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        self.depth = depth

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of one epoch."""
        return with_following(self.batch_sampler, _ahead, max(self.num_workers, 1), self.depth)

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return len(self.batch_sampler)  # type: ignore[arg-type]  # what has none fails as it does without us

    def __getattr__(self, name: str) -> Any:
        """Show what the other sampler has: batch_size, sampler, set_epoch."""
        if name.startswith("__") or "batch_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def with_following(
    batches: Iterable[B], tell: Callable[[B, list[B]], V], num_workers: int, depth: int
) -> Iterator[V]:
    """Yield `tell(batch, the next ones of the same process)` for each batch."""
    rest = iter(batches)
    window: deque[B] = deque(islice(rest, num_workers * depth + 1))
    while window:
        batch = window.popleft()
        yield tell(batch, list(islice(window, num_workers - 1, None, num_workers)))
        window.extend(islice(rest, 1))


def ahead_of(indices: Sequence[int], following: Iterable[Sequence[int]]) -> Ahead:
    """Return the indices with the batches that follow."""
    ahead = Ahead(indices)
    ahead.following = tuple(list(batch) for batch in following)
    return ahead


def _ahead(batch: Sequence[int], following: list[Sequence[int]]) -> list[int]:
    return ahead_of(batch, following)


class ReadAhead(Generic[V]):
    """Reads batches in threads of this process before they are asked for; holds those that were
    announced last, no others.
    """

    def __init__(self, read: Callable[[Sequence[int]], V]) -> None:
        """Begin with nothing.

        Args:
            read: reads a batch; called in threads.
        """
        self._read = read
        self._process = os.getpid()
        self._begun: dict[tuple[int, ...], _Reading[V]] = {}

    def read(self, indices: Sequence[int]) -> V:
        """Return a batch, and begin with those that follow it (`Ahead.following`)."""
        if os.getpid() != self._process:  # the threads of the parent aren't here
            self._process, self._begun = os.getpid(), {}
        following = indices.following if isinstance(indices, Ahead) else ()
        now = self._begun.get(tuple(indices))
        if now is None and not following:
            self._begun = {}
            return self._read(indices)
        now = now or _Reading(self._read, list(indices))
        # A batch that isn't announced any more, since the epoch was broken off, is dropped.
        self._begun = {
            tuple(batch): self._begun.get(tuple(batch)) or _Reading(self._read, batch)
            for batch in following
        }
        return now.result()


class _Reading(Generic[V]):
    """A batch that a thread of its own reads; the thread ends with it."""

    def __init__(self, read: Callable[[Sequence[int]], V], batch: Sequence[int]) -> None:
        self._value: V
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(read, batch), name="ptd-ahead", daemon=True
        )
        self._thread.start()

    def _run(self, read: Callable[[Sequence[int]], V], batch: Sequence[int]) -> None:
        try:
            self._value = read(batch)
        except BaseException as error:  # noqa: BLE001 - it belongs to who asks for the batch
            self._error = error

    def result(self) -> V:
        """Wait for it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._value
