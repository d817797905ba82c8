"""What tells that ranks hold different datasets, and what doesn't."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.data.traits import differing, traits_of

NUM, WORLD_SIZE = 64, 2
X = torch.arange(NUM * 3, dtype=torch.float32).reshape(NUM, 3)
WHOLE = TensorDataset(X, torch.arange(NUM))


class Own(Dataset[Any]):
    """A user's dataset: reading it is an error, since it may cost or change anything."""

    def __init__(self, num: int = NUM, **attributes: Any) -> None:
        self.num = num
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        raise AssertionError(index)


class Sliced(list[int]):
    """A list that runs code when it is read."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError(index)


class Shards:
    """A dataset in shards, of which only names and sizes may be asked."""

    def __init__(self, names: list[Any]) -> None:
        self.names = names

    def shards(self) -> list[Any]:
        return self.names

    def num_samples(self, shard: Any) -> int:
        return 8

    def iter_shard(self, shard: Any) -> Any:
        raise AssertionError(shard)


def own_part(rank: int) -> range:
    """Cut the samples by rank."""
    return range(rank, NUM, WORLD_SIZE)


def shuffled(rank: int) -> list[int]:
    """Put the samples in an order of the rank's own."""
    return random.Random(rank).sample(range(NUM), NUM)


def filled(rank: int) -> list[Any]:
    """Make a cache of samples, of which rank 1 has read the first."""
    return [X[0].tolist() if rank and i == 0 else None for i in range(NUM)]


def replaced(rank: int) -> list[Any]:
    """Name files, of which rank 1 has already put the content in the place of the name."""
    return [X[i] if rank and i % 2 else f"{i}.npy" for i in range(NUM)]


def named(rank: int, indices: Any) -> list[tuple[str, int]]:
    """Name the files of some samples, in a folder of the rank's own."""
    return [(f"/scratch/{rank}/images/{i % 4}/{i}.jpg", i % 4) for i in indices]


DIFFERENT: dict[str, Callable[[int], Any]] = {
    "cut by rank: Subset": lambda rank: Subset(WHOLE, own_part(rank)),
    "cut by rank: Subset of one's own dataset": lambda rank: Subset(Own(), list(own_part(rank))),
    "cut by rank: Subset of a Subset": lambda rank: Subset(
        Subset(WHOLE, own_part(rank)), range(NUM // WORLD_SIZE)
    ),
    "cut by rank: below a wrapper": lambda rank: Own(
        NUM // WORLD_SIZE, dataset=Subset(WHOLE, own_part(rank))
    ),
    "cut by rank: tensors": lambda rank: TensorDataset(X[rank::WORLD_SIZE]),
    "cut by rank: a list": lambda rank: list(own_part(rank)),
    "cut by rank: an array": lambda rank: X.double().numpy()[rank::WORLD_SIZE],
    "cut by rank: names of images": lambda rank: Own(
        NUM // WORLD_SIZE, samples=named(rank, own_part(rank))
    ),
    "cut by rank: one of two parts": lambda rank: ConcatDataset(
        [WHOLE, Subset(WHOLE, own_part(rank))]
    ),
    "cut by rank: a stack": lambda rank: StackDataset(x=TensorDataset(X[rank::WORLD_SIZE])),
    "split by other seeds": lambda rank: torch.utils.data.random_split(
        WHOLE, [32, 32], torch.Generator().manual_seed(rank)
    )[0],
    "another order": lambda rank: Subset(WHOLE, torch.tensor(shuffled(rank))),
    "nested samples": lambda rank: [{"x": [(i,)]} for i in own_part(rank)],
    "files listed in another order": lambda rank: Own(samples=named(0, shuffled(rank))),
    "drawn with other seeds": lambda rank: Own(
        data=np.random.default_rng(rank).normal(size=(NUM, 2)).astype(np.float16)
    ),
    "a shard for each rank": lambda rank: Shards([f"{i}.tar" for i in range(rank, 8, 2)]),
}


def traits(dataset: Any) -> Any:
    """Return what another rank gets to know."""
    loader = RankLoader(dataset, global_batch_size=4, rank=0, world_size=WORLD_SIZE)
    return json.loads(json.dumps(loader.traits))


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_datasets_are_told_apart(kind: str) -> None:
    """Datasets that a program cut, split, listed or drew by rank differ in a place with a name."""
    here, there = (traits(DIFFERENT[kind](rank)) for rank in range(WORLD_SIZE))
    assert differing(here, there)
    assert not differing(here, traits(DIFFERENT[kind](0)))


NORMALIZED = torch.randn(NUM, 3, generator=torch.Generator().manual_seed(0))
EQUAL: dict[str, Callable[[int], Any]] = {
    "the whole": lambda _: WHOLE,
    "copies in other folders": lambda rank: Own(samples=named(rank, range(NUM))),
    "paths in other folders": lambda rank: [Path(f"/host{rank}/{i}.npy") for i in range(NUM)],
    "signed URLs": lambda rank: Shards([f"https://s/{i}.tar?sig={rank}" for i in range(8)]),
    "a copy of the only shard": lambda rank: Shards([f"/dev/shm/{rank}.tar"]),
    "shards of an unknown type": lambda _: Shards([object() for _ in range(8)]),
    "rounded otherwise": lambda rank: TensorDataset(NORMALIZED * (1 + 1e-6 * rank)),
    "computed in other precisions": lambda rank: NORMALIZED.numpy().astype(
        np.float64 if rank else np.float32
    ),
    "values that are nan": lambda _: TensorDataset(torch.full((NUM, 1), torch.nan)),
    "caches of one's own": lambda rank: Own(cache={0: rank}, memory=torch.rand(NUM), rank=rank),
    "a list filled on one rank only": lambda rank: Own(data=filled(rank)),
    "samples filled in part": lambda rank: Own(samples=[(each, 1) for each in filled(rank)]),
    "an array filled on one rank only": lambda rank: Own(data=X + 1 if rank else X * 0),
    "paths replaced by images": lambda rank: Own(samples=replaced(rank)),
    "entries with a cache inside": lambda rank: Own(
        data=[{"id": i, **({"image": X[i]} if rank else {})} for i in range(NUM)]
    ),
    "columns of another length": lambda rank: Own(data=[rank], targets=torch.rand(3)),
    "a wrapper that chooses": lambda rank: Own(32, dataset=list(range(rank, NUM + rank))),
    "other wrappers": lambda rank: Own(dataset=WHOLE) if rank else WHOLE,
    "a list as a list, and as an array": lambda rank: np.arange(NUM) if rank else list(range(NUM)),
    "samples of an unknown type": lambda rank: [Own(rank=rank) for _ in range(NUM)],
    "sparse tensors": lambda rank: Own(data=(X + rank).to_sparse()),
    "a list of one's own": lambda _: Subset(WHOLE, Sliced(range(NUM))),
    "an own length of a Subset": lambda _: Subset(WHOLE, range(NUM)),
    "images of no size": lambda _: TensorDataset(torch.zeros(NUM, 0)),
    "texts, numbers and bytes": lambda _: [
        {"text": "a", "id": i, "image": b"1", "box": (1.5, 2), "z": 1j} for i in range(NUM)
    ],
}


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_datasets_are_equal(kind: str) -> None:
    """What may differ from rank to rank though the samples are equal is no difference."""
    here, there = (traits(EQUAL[kind](rank)) for rank in range(WORLD_SIZE))
    assert not differing(here, there)
    assert not differing(there, here)


def test_looking_draws_nothing() -> None:
    """No random number is drawn, and no sample is fetched."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    for make in (*DIFFERENT.values(), *EQUAL.values()):
        dataset = make(0)
        if not isinstance(dataset, Shards):
            state = torch.get_rng_state()
            traits_of(dataset, len(dataset))
            assert torch.equal(torch.get_rng_state(), state)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert before[1:] == after[1:]


def test_a_loader_keeps_what_it_saw_first() -> None:
    """Samples that a training changes in place later, on each rank its own, are no difference."""
    dataset = TensorDataset(torch.zeros(NUM))
    loader = RankLoader(dataset, global_batch_size=4, rank=0, world_size=WORLD_SIZE)
    before = loader.traits
    dataset.tensors[0].fill_(1.0)
    assert loader.traits == before
