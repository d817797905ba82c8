"""Generators of loaders, samplers and datasets are found, kept and put back."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler

from prefect_torch_ddp.checkpoint.state.serial import from_bytes, to_bytes
from prefect_torch_ddp.integrations.held_generators import MAX_ITEMS, capture_own, restore_own


class Augmented(Dataset[int]):
    """Holds what it is given."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 4


BIT_GENERATORS = (np.random.MT19937, np.random.PCG64, np.random.Philox, np.random.SFC64)


@pytest.mark.parametrize("kind", BIT_GENERATORS)
def test_a_generator_of_numpy_draws_the_same_again(kind: type[Any]) -> None:
    """Its state is stored without code, whichever its bit generator is."""
    generator = np.random.Generator(kind(3))
    loader = DataLoader(ConcatDataset([Augmented(0), Augmented({"flips": [generator]})]))
    generator.integers(9, size=3, dtype=np.int32)
    kept = from_bytes(to_bytes(capture_own([loader])))
    drawn = generator.integers(1000, size=50).tolist()
    restore_own([loader], kept)
    assert generator.integers(1000, size=50).tolist() == drawn


def test_other_generators_than_those_kept_are_left_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning names both; a system's generator has no state, and long lists aren't searched."""
    then = Augmented([torch.Generator(), random.Random(1)])
    own = torch.Generator()
    now = RandomSampler(
        Augmented([random.SystemRandom(), [random.Random(1)] * (MAX_ITEMS + 1)]), generator=own
    )
    before = own.get_state()
    restore_own([now], capture_own([then]))
    assert torch.equal(own.get_state(), before)
    assert "of other generators of DataLoaders, samplers and datasets" in caplog.text
    assert "(Generator, Random) than there are (Generator)" in caplog.text
