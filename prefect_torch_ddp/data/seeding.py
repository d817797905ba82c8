"""Owns the generators that datasets draw from, python's, NumPy's and torch's: seeded for each sample, and put back."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


def seed_on_cpu(seed: int) -> None:
    """Seed what datasets draw from: the global generators of python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - augmentations draw from the global generator
    _seed_torch(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put python's, numpy's and torch's random generators back at the end."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])


class SeededSamples:
    """Fetches samples, for each of which the generators that its dataset draws from are seeded.

    Seeding all three takes some 40 µs between augmentations, whose data push the generators out of the processor's caches, and
    three quarters of that are python's and NumPy's, which few datasets draw from. So these two are looked at: where nothing drew
    from them in the first batch, they are left alone from then on, and compared after each batch. One that did draw after all is
    fetched again, seeded for each sample, as everything is that follows: what comes of it is the same as if it always had been.
    """

    def __init__(self) -> None:
        """Expect nothing yet of what is drawn from."""
        self._only_torch: bool | None = None
        """Whether no sample has drawn from python's or NumPy's generator so far; None before the first one."""

    def fetch(self, dataset: Dataset[Any], indices: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        """Return the samples of these indices, each fetched with the seed of its own."""
        if self._only_torch is None:
            return self._looking(dataset, indices, seeds)
        if self._only_torch:
            before = _python_and_numpy()
            samples = _fetch(dataset, indices, seeds, _seed_torch)
            if _python_and_numpy() == before:
                return samples
            self._only_torch = False
        return _fetch(dataset, indices, seeds, seed_on_cpu)

    def _looking(self, dataset: Dataset[Any], indices: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        self._only_torch = True
        samples = []
        for index, seed in zip(indices, seeds, strict=True):
            seed_on_cpu(seed)
            before = _python_and_numpy() if self._only_torch else None
            samples.append(dataset[index])
            self._only_torch = self._only_torch and _python_and_numpy() == before
        return samples


def _fetch(dataset: Dataset[Any], indices: Sequence[int], seeds: Sequence[int], seed_with: Callable[[int], None]) -> list[Any]:
    samples = []
    for index, seed in zip(indices, seeds, strict=True):
        seed_with(seed)
        samples.append(dataset[index])
    return samples


def _seed_torch(seed: int) -> None:
    # Not torch.manual_seed: before CUDA is up it queues one call per sample, for ever.
    torch.default_generator.manual_seed(seed)


def _python_and_numpy() -> tuple[Any, ...]:
    numpys = np.random.get_state(legacy=False)  # noqa: NPY002 - what datasets draw from
    return random.getstate(), numpys["state"]["key"].tobytes(), numpys["state"]["pos"], numpys["has_gauss"], numpys["gauss"]
