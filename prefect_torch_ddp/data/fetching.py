"""Owns what samples are fetched through: the user's dataset, seeded for each sample, and the ids that come along with a batch."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from prefect_torch_ddp.data.sampler import mix_seed

BatchKeys = tuple[int, list[int]]
"""(epoch, sample indices): the epoch travels with the indices, so persistent workers know it too."""


class SeededDataset(Dataset[Any]):
    """The user's dataset, with the random generators of a worker process seeded for each sample.

    `get_worker_info().dataset` is this object: what a `worker_init_fn` reads from it or sets on it goes to the user's own.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, *, seeds_here: bool, keep_ids: bool) -> None:
        self.__dict__.update(_dataset=dataset, _seed=seed, _seeds_here=seeds_here, _keep_ids=keep_ids)

    def __getitems__(self, keys: BatchKeys) -> Any:
        data = self._fetch(*keys)
        return Tagged(tuple(keys[1]), data) if self._keep_ids else data

    def _fetch(self, epoch: int, indices: list[int]) -> Any:
        dataset = self._dataset
        fetch_all = getattr(dataset, "__getitems__", None)
        seeds = self._seeds()
        if fetch_all is not None:
            if seeds:
                self._seed_all(epoch, indices[0])
            return fetch_all(indices)
        if seeds:
            return [self._fetch_seeded(epoch, index) for index in indices]
        return [dataset[index] for index in indices]

    def _fetch_seeded(self, epoch: int, index: int) -> Any:
        self._seed_all(epoch, index)
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:  # the latter: while it is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._dataset, name, value)

    def _seeds(self) -> bool:
        # In the rank itself the generators belong to the training, unless that seeds them for each step.
        return get_worker_info() is not None or self._seeds_here

    def _seed_all(self, epoch: int, index: int) -> None:
        seed_on_cpu(mix_seed(self._seed, epoch, index))


@dataclass(frozen=True)
class Tagged:
    """A batch, with the ids of the samples that it was made of: they come the same way, from the process that fetched them."""

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


def seed_on_cpu(seed: int) -> None:
    """Seed what datasets draw from: the global generators of python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - augmentations draw from the global generator
    # Not torch.manual_seed: before CUDA is up it queues one call per sample, for ever.
    torch.default_generator.manual_seed(seed)
