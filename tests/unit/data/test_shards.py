"""Datasets that are read shard by shard: the same order for every number of ranks, each sample
once, from any batch on."""

import random
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from prefect_torch_ddp.errors import InvalidParamsError
from tests.unit.data.test_loader import loader_of, walk


class Shards(IterableDataset[int]):
    """Shards of given sizes; its samples are numbered on through all of them."""

    def __init__(self, sizes: list[int], shuffle_buffer: int = 4) -> None:
        self.sizes = sizes
        self.shuffle_buffer = shuffle_buffer
        self.opened: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        """Go through all of them, as a plain DataLoader would."""
        return (sample for shard in self.shards() for sample in self.iter_shard(shard))

    def shards(self) -> range:
        return range(len(self.sizes))

    def num_samples(self, shard: int) -> int:
        return self.sizes[shard]

    def iter_shard(self, shard: int) -> Iterator[Any]:
        self.opened.append(shard)
        first = sum(self.sizes[:shard])
        yield from range(first, first + self.sizes[shard])


class Noisy(Shards):
    """Draws from all three global generators for each sample, as augmentations do."""

    def iter_shard(self, shard: int) -> Iterator[Any]:
        for number in super().iter_shard(shard):
            drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
            yield torch.tensor([number, *drawn], dtype=torch.float64)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any),
    buffer=st.integers(1, 9),
    size=st.integers(1, 8),
    world=st.integers(2, 4),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_each_sample_once_and_the_same_batches_for_any_number_of_ranks(
    *, sizes, buffer, size, world, shuffle, data
) -> None:
    """Any sizes of shards, batches, buffers and worlds give the same batches, from any start."""
    dataset = Shards(sizes, buffer)
    whole = walk(dataset, size, 1, epoch=1, shuffle=shuffle)
    flat = [sample for batch in whole for sample in batch]
    assert sorted(flat) == list(range(sum(sizes)))
    assert shuffle or flat == sorted(flat)
    start = data.draw(st.integers(0, len(whole)))
    assert walk(dataset, size, world, epoch=1, start=start, shuffle=shuffle) == whole[start:]


def test_shuffling_mixes_shards_and_the_samples_of_a_buffer_and_differs_by_epoch() -> None:
    """Shards come in another order, samples are mixed within the buffer, here of a shard's size,
    and no further."""
    dataset = Shards([8] * 20, shuffle_buffer=8)
    first, second = ([*chain(*walk(dataset, 16, 1, epoch))] for epoch in (0, 1))
    assert first != second
    blocks = [first[i : i + 8] for i in range(0, 160, 8)]
    assert all(len({sample // 8 for sample in block}) == 1 for block in blocks)
    assert [block[0] // 8 for block in blocks] != list(range(20))
    assert any(block != sorted(block) for block in blocks)


def test_only_shards_that_are_needed_are_opened() -> None:
    """A rank whose share lies in whole shards, or that begins late, doesn't open the others."""
    dataset = Shards([4] * 10)
    loaded = loader_of(dataset, 8, rank=1, world_size=2, shuffle=False).lockstep(0, 3)
    assert [data.tolist() for data, _ in loaded] == [[28, 29, 30, 31], [36, 37, 38, 39]]
    assert dataset.opened == [7, 9]


@pytest.mark.parametrize("start", [0, 3])
def test_what_a_dataset_draws_is_the_same_wherever_it_is_read(start: int) -> None:
    """For any number of ranks, from the middle on, whatever the generators stood at; they stand
    there afterwards."""
    expected = walk(Noisy([7, 9, 3, 11], 5), 6, 1)
    torch.manual_seed(start)
    before = random.getstate(), torch.get_rng_state()
    assert walk(Noisy([7, 9, 3, 11], 5), 6, 2, start=start) == expected[start:]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_what_collate_fn_draws_is_the_batchs_own_on_an_elastic_rank() -> None:
    """Other ranks go through fewer of them, so the rank's stream can't give it."""

    def noisy(samples: list[Any]) -> torch.Tensor:
        return torch.tensor(samples) + torch.rand(())

    def drawn(start: int) -> list[Any]:
        torch.manual_seed(start)
        loader = loader_of(Shards([7, 9]), 4, collate_fn=noisy, virtual_ranks=1)
        return [data.shares[0].batch.tolist() for data, _ in loader.lockstep(0, start)]

    assert drawn(2) == drawn(0)[2:]


@pytest.mark.parametrize(("says", "word"), [(5, "fewer"), (3, "more")])
def test_a_shard_of_another_size_than_it_says_is_refused(says: int, word: str) -> None:
    """By its name: samples would be lost or come twice."""

    class Lying:  # no IterableDataset: the three methods are enough
        def shards(self) -> list[str]:
            return ["a", "b"]

        def num_samples(self, shard: str) -> int:
            return says if shard == "b" else 4

        def iter_shard(self, shard: str) -> Iterator[int]:
            return iter(range(4))

    words = re.escape(f"shard 'b' has {word} samples than num_samples says, {says}")
    with pytest.raises(InvalidParamsError, match=words):
        list(loader_of(Lying(), 2, shuffle=False))
