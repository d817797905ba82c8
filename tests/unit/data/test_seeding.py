"""Samples fetched with a seed each: the same as if all three generators were seeded every time, whatever draws when."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from prefect_torch_ddp.data.seeding import SeededSamples, seed_on_cpu

DRAWS: dict[str, Callable[[], float]] = {
    "nothing": float,
    "torch": lambda: torch.rand(()).item(),
    "python": random.random,
    "python, a normal number": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy, a normal number": np.random.randn,
    "all": lambda: torch.rand(()).item() + random.random() + np.random.rand(),  # noqa: NPY002
}


class Drawn(Dataset[float]):
    """Each sample is drawn from what its place says; what has been fetched is kept."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = kinds
        self.fetched: list[int] = []

    def __getitem__(self, index: int) -> float:
        self.fetched.append(index)
        return DRAWS[self.kinds[index]]()


def _seeded_each(kinds: list[str]) -> list[float]:
    drawn = []
    for seed, kind in enumerate(kinds):
        seed_on_cpu(seed)
        drawn.append(DRAWS[kind]())
    return drawn


@given(kinds=st.lists(st.sampled_from(sorted(DRAWS)), min_size=1, max_size=40), size=st.integers(1, 7))
def test_what_is_drawn_follows_from_the_seed_alone(kinds: list[str], size: int) -> None:
    """Whichever sample draws from whichever generator, in batches of whatever size."""
    samples, dataset = SeededSamples(), Drawn(kinds)
    drawn: list[float] = []
    for start in range(0, len(kinds), size):
        places = range(start, min(start + size, len(kinds)))
        drawn += samples.fetch(dataset, places, places)
    assert drawn == _seeded_each(kinds)


@pytest.mark.parametrize("kind", DRAWS)
def test_a_dataset_that_draws_alike_is_fetched_once(kind: str) -> None:
    """What is seen in the first batch spares the second look."""
    samples, dataset = SeededSamples(), Drawn([kind] * 12)
    for start in range(0, 12, 4):
        places = range(start, start + 4)
        samples.fetch(dataset, places, places)
    assert dataset.fetched == list(range(12))


def test_the_batch_that_draws_first_is_fetched_again() -> None:
    """Once: from then on everything is seeded."""
    samples, dataset = SeededSamples(), Drawn(["torch"] * 5 + ["numpy"] + ["python"] * 6)
    drawn = [x for start in range(0, 12, 2) for x in samples.fetch(dataset, range(start, start + 2), range(start, start + 2))]
    assert dataset.fetched == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9, 10, 11]
    assert drawn == _seeded_each(dataset.kinds)


def test_without_draws_python_and_numpy_are_left_alone() -> None:
    """To seed them is most of what seeding costs."""
    samples, dataset = SeededSamples(), Drawn(["torch"] * 4)
    samples.fetch(dataset, [0, 1], [0, 1])
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    samples.fetch(dataset, [2, 3], [2, 3])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
