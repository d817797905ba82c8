"""Owns what samples are fetched through: the user's dataset, seeded for each sample, and the
ids that come along with a batch.

Owns the generators that datasets draw from, python's, NumPy's and torch's: seeded for each
sample, and put back.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from prefect_torch_ddp.data.lookahead import Ahead, ahead_of
from prefect_torch_ddp.data.sampler import mix_seed
from prefect_torch_ddp.errors import CorruptImageError, InvalidParamsError

SeedSamples: TypeAlias = bool | Literal["torch"]
"""Which generators are seeded for each sample in worker processes: python's, NumPy's and
torch's; torch's alone; none."""


def check_seed_samples(seed_samples: object) -> None:
    """Refuse what is no choice.

    Raises:
        InvalidParamsError: names the choices.
    """
    if not isinstance(seed_samples, bool) and seed_samples != "torch":
        msg = f"seed_samples is {seed_samples!r}; choose True, 'torch' or False"
        raise InvalidParamsError(msg)


def seed_on_cpu(seed: int, seed_samples: SeedSamples = True) -> None:  # noqa: FBT002 - a choice of three
    """Seed what datasets draw from: the global generators of python, numpy and torch, or of
    torch alone.
    """
    if seed_samples is True:
        random.seed(seed)
        np.random.seed(seed % 2**32)
    # Not torch.manual_seed: before CUDA is up it queues one call per sample, for ever.
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put python's, numpy's and torch's random generators back at the end."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


NUM_STAND_INS = 16
"""So many neighbours are tried before all of a batch that can't be read is an error."""

BatchKeys = tuple[int, list[int]]
"""(epoch, sample indices): the epoch travels with the indices, so persistent workers know it
too."""


Fetch: TypeAlias = Callable[
    [Sequence[int], Callable[[int], None] | None], tuple[Sequence[int], list[Any]]
]


@runtime_checkable
class FetchesSeeded(Protocol):
    """A dataset that reads batches at once and ahead of use, and has each sample of one seeded
    for itself.
    """

    @property
    def may_skip(self) -> bool:
        """Whether it may leave samples out of a batch."""
        ...

    def fetch_seeded(
        self, indices: Sequence[int], before_each: Callable[[int], None] | None = None
    ) -> tuple[Sequence[int], list[Any]]:
        """Return which of the batch came, as places in it, and their samples; `before_each` is
        called with a sample's place.
        """
        ...


def seeded_fetch(dataset: object) -> Fetch | None:
    """Return what fetches a batch of such a dataset, also of torch's Subset of one; None for
    other datasets.
    """
    if isinstance(dataset, FetchesSeeded):
        return dataset.fetch_seeded
    inner = seeded_fetch(dataset.dataset) if type(dataset) is Subset else None
    if inner is None:
        return None
    chosen: Sequence[int] = dataset.indices  # type: ignore[attr-defined]

    def fetch(
        indices: Sequence[int], before_each: Callable[[int], None] | None
    ) -> tuple[Sequence[int], list[Any]]:
        following = indices.following if isinstance(indices, Ahead) else ()
        return inner(
            ahead_of(
                [chosen[i] for i in indices], ([chosen[i] for i in batch] for batch in following)
            ),
            before_each,
        )

    return fetch


def may_skip(dataset: object) -> bool:
    """Tell whether a dataset, or torch's Subset of it, may leave samples out of a batch."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return isinstance(dataset, FetchesSeeded) and dataset.may_skip


class SeededDataset(Dataset[Any]):
    """The user's dataset, with the random generators of a worker process seeded for each
    sample.

    `get_worker_info().dataset` is this object: what a `worker_init_fn` reads from it or sets on
    it goes to the user's own.
    """

    def __init__(  # noqa: PLR0913 - what its loader knows of it, by name
        self,
        dataset: Dataset[Any],
        seed: int,
        *,
        seeds_here: bool,
        keep_ids: bool,
        stands_in: bool = False,
        seed_samples: SeedSamples = True,
    ) -> None:
        """Keep what it takes."""
        self.__dict__.update(
            _dataset=dataset,
            _seed=seed,
            _seeds_here=seeds_here,
            _keep_ids=keep_ids,
            _stands_in=stands_in,
        )
        self.__dict__.update(_seed_samples=seed_samples)
        # Asked once: to compare with a protocol takes longer than to fetch some samples.
        self.__dict__.update(_looks_ahead=seeded_fetch(dataset) is not None)

    def __getitems__(self, keys: BatchKeys) -> Any:
        epoch, indices = keys
        fetch = seeded_fetch(self._dataset) if self._looks_ahead else None
        if fetch is not None:
            places, data = self._fetch_some(fetch, epoch, indices)
            indices = [indices[place] for place in places]
        else:
            data = self._fetch(epoch, indices)
        return Tagged(tuple(indices), data) if self._keep_ids else data

    def _fetch_some(
        self, fetch: Fetch, epoch: int, indices: list[int]
    ) -> tuple[Sequence[int], list[Any]]:
        """Fetch what can be read of a batch; where that is nothing, another sample as a
        stand-in that doesn't count.
        """
        before_each = (
            (lambda place: self._seed_all(epoch, indices[place])) if self._seeds() else None
        )
        try:
            return fetch(indices, before_each)
        except CorruptImageError:
            if not self._stands_in:
                raise
            for number in range(indices[0] + 1, indices[0] + 1 + NUM_STAND_INS):
                with suppress(CorruptImageError):
                    return (), fetch([number % len(self._dataset)], None)[1]
            raise

    def _fetch(self, epoch: int, indices: list[int]) -> Any:
        dataset = self._dataset
        fetch_all = getattr(dataset, "__getitems__", None)
        seeds = self._seeds()
        if fetch_all is not None:
            if seeds:
                self._seed_all(epoch, indices[0])
            return fetch_all(indices)
        if seeds:
            # All seeds in one go: after a sample, whose data fill the processor's caches,
            # making one takes ten times as long.
            seed_of = [mix_seed(self._seed, epoch, index) for index in indices]
            return [
                self._fetch_seeded(index, seed)
                for index, seed in zip(indices, seed_of, strict=True)
            ]
        return [dataset[index] for index in indices]

    def _fetch_seeded(self, index: int, seed: int) -> Any:
        seed_on_cpu(seed, self._seed_samples)
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        if (
            name.startswith("__") or "_dataset" not in self.__dict__
        ):  # the latter: while it is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._dataset, name, value)

    def _seeds(self) -> bool:
        # In the rank itself the generators belong to the training, unless that seeds them for
        # each step.
        return self._seed_samples is not False and (
            get_worker_info() is not None or self._seeds_here
        )

    def _seed_all(self, epoch: int, index: int) -> None:
        seed_on_cpu(mix_seed(self._seed, epoch, index), self._seed_samples)


@dataclass(frozen=True)
class Tagged:
    """A batch, with the ids of the samples that it was made of: they come the same way, from
    the process that fetched them.
    """

    samples: tuple[int, ...]
    data: Any

    def pin_memory(self) -> Self:
        """Pin the batch's tensors, as the DataLoader asks of a type it doesn't know."""
        return type(self)(self.samples, pin_memory(self.data))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class TaggedCollate:
    """The user's collate function, around which the ids travel."""

    collate: Callable[[Any], Any]

    def __call__(self, fetched: Tagged) -> Tagged:
        """Collate a fetched batch."""
        return Tagged(fetched.samples, self.collate(fetched.data))


def untagged(loaded: Iterator[Tagged], ids: list[int]) -> Iterator[Any]:
    """Yield the batches alone, and add the ids of each to the list as it comes."""
    for tagged in loaded:
        ids += tagged.samples
        yield tagged.data
