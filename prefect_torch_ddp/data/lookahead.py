"""The look-ahead: a process that loads a batch knows its next one, and reads that meanwhile."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, Generic, TypeVar

from torch.utils.data import Sampler

from prefect_torch_ddp.lazy import exported_by

B = TypeVar("B", bound=Sequence[Any])
V = TypeVar("V")


class Ahead(list[int]):
    """The indices of a batch, with those of the batches that the same process loads next."""

    following: tuple[list[int], ...] = ()


@exported_by("prefect_torch_ddp.data")
class LookAhead(Sampler[list[int]]):
    """A batch sampler that tells each loader process which batches it gets next.

    A DataLoader gives batches to its processes in turn, so a process's next batch comes
    `num_workers` batches later. To a dataset that doesn't look ahead the batches are plain lists.
    `ctx.loader` uses this class by itself.

    Args:
        batch_sampler: yields lists of indices.
        num_workers: that of the DataLoader.

    Example:
        With your own DataLoader:

            from prefect_torch_ddp.data import LookAhead
            from torch.utils.data import BatchSampler, DataLoader, RandomSampler

            sampler = BatchSampler(RandomSampler(dataset), batch_size=64, drop_last=False)
            loader = DataLoader(dataset, batch_sampler=LookAhead(sampler, 2), num_workers=2)
    """

    def __init__(self, batch_sampler: Iterable[Sequence[int]], num_workers: int) -> None:
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[list[int]]:
        for batch, following in with_following(self.batch_sampler, self.num_workers):
            yield ahead_of(batch, following)

    def __len__(self) -> int:
        # What has none fails as it does without us.
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Show what the other sampler has: batch_size, sampler, set_epoch."""
        if name.startswith("__") or "batch_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def with_following(batches: Iterable[B], num_workers: int) -> Iterator[tuple[B, list[B]]]:
    """Yield each batch with the next one of the same process, if there is one."""
    step = max(num_workers, 1)
    rest = iter(batches)
    window: deque[B] = deque(islice(rest, step + 1))
    while window:
        batch = window.popleft()
        yield batch, list(islice(window, step - 1, None))
        window.extend(islice(rest, 1))


def ahead_of(indices: Sequence[int], following: Iterable[Sequence[int]]) -> Ahead:
    """Return the indices with the batches that follow."""
    ahead = Ahead(indices)
    ahead.following = tuple(list(batch) for batch in following)
    return ahead


class ReadAhead(Generic[V]):
    """Reads batches by `read`, in threads, before they are asked for.

    Holds only those announced last.
    """

    def __init__(self, read: Callable[[Sequence[int]], V]) -> None:
        self._read = read
        self._process = os.getpid()
        self._begun: dict[tuple[int, ...], Future[V]] = {}

    def read(self, indices: Sequence[int]) -> V:
        """Return a batch, and begin with those that follow it (`Ahead.following`)."""
        if os.getpid() != self._process:  # the threads of the parent aren't here
            self._process, self._begun = os.getpid(), {}
        following = indices.following if isinstance(indices, Ahead) else ()
        now = self._begun.get(tuple(indices))
        if now is None and not following:
            self._begun = {}
            return self._read(indices)
        now = now or self._begin(list(indices))
        # A batch that isn't announced any more, since the epoch was broken off, is dropped.
        self._begun = {
            tuple(batch): self._begun.get(tuple(batch)) or self._begin(batch) for batch in following
        }
        return now.result()

    def _begin(self, batch: Sequence[int]) -> Future[V]:
        # Its own thread and not a pool's, which may not be used after a fork.
        reading: Future[V] = Future()
        args = (reading, batch)
        threading.Thread(target=self._fulfil, args=args, name="ptd-ahead", daemon=True).start()
        return reading

    def _fulfil(self, reading: Future[V], batch: Sequence[int]) -> None:
        try:
            reading.set_result(self._read(batch))
        except BaseException as error:  # noqa: BLE001 - it belongs to who asks for the batch
            reading.set_exception(error)
