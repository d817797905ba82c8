"""A rank's loader: lockstep over ranks, exact passes, resume mid-epoch, what is refused."""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data.fetching import SeededDataset, gathered, generators_kept, may_skip
from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.errors import InvalidParamsError


class Numbers(Dataset[int]):
    """The numbers 0 to n - 1, and a ledger of those read."""

    def __init__(self, num: int, transform: Callable[[int], Any] | None = None) -> None:
        self.num = num
        self.transform = transform
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return index if self.transform is None else self.transform(index)


class Noise(Numbers):
    """Draws from all three global generators for each sample, as augmentations do."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(
            [index, random.random(), np.random.rand(), torch.rand(()).item()],
            dtype=torch.float64,
        )


class Stream(IterableDataset[int]):
    """Has no length and no order of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class NoLength(Dataset[int]):
    """A dataset that forgot __len__."""

    def __getitem__(self, index: int) -> int:
        return index


def _loaders(num: int, size: int, world: int, **kwargs: Any) -> list[RankLoader]:
    return [
        RankLoader(Numbers(num), global_batch_size=size, rank=rank, world_size=world, **kwargs)
        for rank in range(world)
    ]


def _ledger(loaders: list[RankLoader], epoch: int, start_batch: int = 0) -> list[list[int]]:
    """Walk all ranks in lockstep; return the samples that count, one list per global batch."""
    batches = []
    for step in zip(*(loader.lockstep(epoch, start_batch) for loader in loaders), strict=True):
        counted = [i for data, share in step for i in data[: share.num_local].tolist()]
        assert all(share.num_global == len(counted) for _, share in step)
        assert all(len(data) == max(share.num_local, 1) for data, share in step)
        assert {int(i) for data, _ in step for i in data} == set(counted), (
            "a stand-in is a sample of its own global batch"
        )
        assert {(share.epoch, share.batch) for _, share in step} == {
            (epoch, start_batch + len(batches))
        }
        assert {share.is_last for _, share in step} == {
            start_batch + len(batches) == len(loaders[0]) - 1
        }
        batches.append(counted)
    return batches


@settings(max_examples=60, deadline=None)
@given(
    num=st.integers(1, 60),
    size=st.integers(1, 20),
    worlds=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_lockstep_resumes_to_the_uninterrupted_suffix_at_any_world_size(
    *, num: int, size: int, worlds: tuple[int, int], epoch: int, seed: int, data: st.DataObject
) -> None:
    """Every rank yields equally many batches; a resume at another world size continues the
    same global batches."""
    whole = _ledger(_loaders(num, size, worlds[0], seed=seed), epoch)
    assert sorted(i for batch in whole for i in batch) == list(range(num))
    start = data.draw(st.integers(0, len(whole)))
    assert _ledger(_loaders(num, size, worlds[1], seed=seed), epoch, start) == whole[start:]


def test_resume_does_not_load_the_skipped_batches() -> None:
    """Starting at batch 3 of 5 reads two batches."""
    dataset = Numbers(10)
    loader = RankLoader(dataset, global_batch_size=2, rank=0, world_size=1, shuffle=False)
    assert [data.tolist() for data, _ in loader.lockstep(0, 3)] == [[6, 7], [8, 9]]
    assert dataset.read == [6, 7, 8, 9]
    assert list(loader.lockstep(0, 5)) == []
    with pytest.raises(InvalidParamsError, match="can't start at batch 6: an epoch has 5"):
        loader.lockstep(0, 6)


def test_exact_pass_leaves_a_rank_without_a_share_one_batch_fewer() -> None:
    """No padding: 5 samples in batches of 4 give ranks 1, 2 and 3 nothing of the tail."""
    loaders = _loaders(5, 4, 4, shuffle=False)
    assert [[data.tolist() for data in loader] for loader in loaders] == [
        [[0], [4]],
        [[1]],
        [[2]],
        [[3]],
    ]
    assert {len(loader) for loader in loaders} == {2}


def test_a_loop_of_ones_own_shuffles_and_augments_each_epoch_anew() -> None:
    """As people expect of shuffling; each rank's pass is the same epoch, also without a batch."""
    loaders = _loaders(9, 4, 5)
    passes = [[i for loader in loaders for data in loader for i in data.tolist()] for _ in "abc"]
    assert all(sorted(samples) == list(range(9)) for samples in passes)
    assert len({tuple(samples) for samples in passes}) == 3
    noise = RankLoader(  # seeded here too
        Noise(3), global_batch_size=2, rank=0, world_size=1, shuffle=False, virtual_ranks=1
    )
    drawn = [[data[:, 1:].tolist() for data in noise] for _ in "ab"]
    assert drawn[0] != drawn[1]


def test_a_pass_counts_once_its_second_batch_is_asked_for() -> None:
    """One rank may look at a first batch; a loop that is left early is an epoch nevertheless."""
    loader = RankLoader(Numbers(8), global_batch_size=2, rank=0, world_size=1)
    next(iter(loader))
    assert loader.epoch == 0
    for number, _ in enumerate(loader):
        if number == 1:
            break
    assert loader.epoch == 1
    loader.epoch = 7
    list(loader)
    assert loader.epoch == 8


def test_evaluations_between_steps_keep_their_order() -> None:
    """Their number is in no checkpoint: a resumed training would evaluate in another order."""
    with RankContext.local() as ctx:
        train, held_out = (ctx.loader(Numbers(20), global_batch_size=20) for _ in "ab")
        steps = ctx.steps(train, epochs=3)
        seen = [[data.tolist() for data in held_out] for _ in steps]
    assert seen[0] == seen[1] == seen[2]


def test_iterating_leaves_the_global_generators_alone() -> None:
    """Dropout after a resume draws what it would have drawn, so loading must not draw."""
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    list(RankLoader(Numbers(9), global_batch_size=2, rank=0, world_size=2).lockstep(1))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_default_device_of_the_user_does_not_matter() -> None:
    """torch.set_default_device("cuda") breaks a plain DataLoader with a generator; "meta"
    stands for it without a GPU."""
    with torch.device("meta"):
        loader = RankLoader(Numbers(5), global_batch_size=5, rank=0, world_size=1, collate_fn=list)
        assert [sorted(data) for data in loader] == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("dataset", "kwargs", "words"),
    [
        (Stream(), {}, "IterableDataset"),
        (NoLength(), {}, "NoLength has no __len__"),
        (Numbers(0), {}, "0 samples"),
        (Numbers(3), {"batch_size": 2}, "batch_size can't be passed"),
        (
            Numbers(3),
            {"sampler": [1], "batch_sampler": [[1]]},
            "batch_sampler, sampler can't be passed",
        ),
        (Numbers(3), {"generator": torch.Generator()}, "generator can't be passed"),
        # They would be counted wrongly, and lost or repeated at a resume.
        (Numbers(3), {"in_order": False}, "in_order=False .* lost or repeated at a resume"),
        (Numbers(3), {"seed_samples": "numpy"}, "choose True, 'torch' or False"),
        (Numbers(3), {"seed_samples": False, "virtual_ranks": 1}, "can't be used with determinism"),
        (Numbers(3), {"rank": 2, "world_size": 2}, "rank is 2 and world_size is 2"),
        (TensorDataset(torch.ones(3)), {"drop_last": True}, "drop_last leaves no batch"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    dataset: Dataset[Any], kwargs: dict[str, Any], words: str
) -> None:
    """Before a worker process starts, with the name of what is wrong."""
    with pytest.raises(InvalidParamsError, match=words):
        RankLoader(dataset, **{"global_batch_size": 4, "rank": 0, "world_size": 1, **kwargs})


def test_the_order_that_torch_keeps_by_default_may_be_named() -> None:
    """Only batches out of order would be lost."""
    loader = RankLoader(Numbers(3), global_batch_size=3, rank=0, world_size=1, in_order=True)
    assert sorted(next(iter(loader)).tolist()) == [0, 1, 2]


class NoiseAtOnce(Noise):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Part(Subset[Any]):
    """A user's own Subset."""


def _drawn(dataset: Any, shares: list[list[int]]) -> list[str]:
    """Fetch the samples of these shares of a batch, as a worker process would."""
    seeded = SeededDataset(dataset, 1, seed_samples=True, seeds_here=True, stands_in=False)
    with generators_kept():
        return [str(sample) for share in shares for sample in seeded.__getitems__((0, share)).data]


@pytest.mark.parametrize(
    "dataset",
    [
        Noise(8),
        Subset(Noise(8), range(8)),
        Part(Noise(8), range(8)),
        random_split(Noise(8), [8, 0], torch.Generator())[0],
        Subset(Subset(Noise(9), range(9)), range(8)),
        StackDataset(Noise(8), Subset(Noise(8), range(8))),
        Subset(StackDataset(a=Noise(8), b=Noise(8)), range(8)),
    ],
)
def test_what_a_sample_draws_follows_from_the_sample_alone(dataset: Any) -> None:
    """Else augmentation depended on how many ranks share the batch."""
    whole, parts = _drawn(dataset, [[0, 1, 2, 3]]), _drawn(dataset, [[0, 1], [2, 3]])
    assert whole == parts


class Doubled(TensorDataset):
    """Has samples of its own."""

    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Backwards(TensorDataset):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices[::-1]]


def _tensors() -> list[torch.Tensor]:
    images = torch.arange(12 * 16.0).reshape(12, 4, 2, 2)
    others = images.to(memory_format=torch.channels_last), images[:, ::2], images.bfloat16()
    flat = torch.arange(12), torch.randn(12, 0), torch.randn(12, requires_grad=True)
    return [images, *others, *flat, torch.randn(12, 3, 4, 2, 2)]


class Untidy(TensorDataset):
    """Holds what isn't a tensor."""

    def __init__(self) -> None:
        self.tensors = torch.arange(12), np.arange(12)  # type: ignore[assignment]


PLAIN = TensorDataset(*_tensors())
WINDOWS: Any = [slice(i, i + 2) for i in [*range(11), 3]]


@pytest.mark.parametrize(
    ("dataset", "at_once"),
    [
        (PLAIN, True),
        (Subset(PLAIN, torch.randperm(12).tolist()), True),
        (Subset(PLAIN, cast("Any", torch.randperm(12))), True),
        (Subset(PLAIN, cast("Any", np.arange(12, dtype=np.uint16))), True),
        (Subset(Part(PLAIN, range(12)), range(12)), True),
        (random_split(PLAIN, [12, 0], torch.Generator())[0], True),
        (Subset(PLAIN, [-1, *range(10), 3]), False),
        (Subset(PLAIN, cast("Any", torch.arange(12).int())), False),
        (Subset(PLAIN, cast("Any", torch.arange(12)[:, None])), False),
        (Subset(PLAIN, cast("Any", np.arange(12)[:, None])), False),
        (Subset(PLAIN, WINDOWS), False),
        (TensorDataset(torch.randn(12, 3, 2, 2, 4).permute(0, 1, 4, 2, 3)), False),
        (TensorDataset(torch.nn.Parameter(torch.randn(12))), False),
        (Untidy(), False),
        (Doubled(*_tensors()), False),
        (Backwards(torch.arange(12)), False),
    ],
)
def test_batches_of_tensors_are_those_of_a_dataloader(dataset: Any, at_once: bool) -> None:
    """To the strides, by which a convolution chooses how to add up."""
    loader = RankLoader(dataset, global_batch_size=10, rank=1, world_size=2, keep_ids=True)
    ours, shares = zip(*loader.lockstep(epoch=1), strict=True)
    assert [len(share.samples) for share in shares] == [5, 1]
    theirs = DataLoader(dataset, batch_sampler=[[*share.samples] for share in shares])
    for batch, expected in zip(ours, theirs, strict=True):
        assert type(batch) is type(expected)
        for tensor, like in zip(batch, expected, strict=True):
            assert torch.equal(tensor, like)
            assert tensor.stride() == like.stride()
            assert tensor.dtype == like.dtype
            assert tensor.requires_grad == like.requires_grad
    assert (gathered(dataset, shares[0].samples) is not None) is at_once


def test_torchs_own_way_to_collate_tensors_may_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the docstring of default_collate shows it."""
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, **_: len(batch))
    dataset = TensorDataset(torch.arange(4))
    loader = RankLoader(dataset, global_batch_size=4, rank=0, world_size=1)
    assert list(loader) == [[4]]


def test_an_index_out_of_range_is_named_as_by_torch() -> None:
    """With the number, as somebody has taken another dataset's indices."""
    dataset = Subset(TensorDataset(torch.arange(3)), [0, 1, 7])
    loader = RankLoader(dataset, global_batch_size=3, rank=0, world_size=1)
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        next(iter(loader))


def test_a_collate_fn_is_given_the_samples_of_tensors_too() -> None:
    """Each a tuple, as torch hands them on."""
    given: list[Any] = []
    dataset = TensorDataset(torch.arange(4), torch.ones(4))
    loader = RankLoader(
        dataset, global_batch_size=4, rank=0, world_size=1, shuffle=False, collate_fn=given.append
    )
    list(loader)
    assert given == [[(torch.tensor(i), torch.tensor(1.0)) for i in range(4)]]


def test_a_dataset_that_reads_at_once_is_seeded_for_each_batch() -> None:
    """Also behind a Subset: it is asked for the whole batch, as it is meant to be."""
    dataset = Subset(NoiseAtOnce(8), range(8))
    whole, parts = _drawn(dataset, [[0, 1, 2, 3]]), _drawn(dataset, [[0, 1], [2, 3]])
    assert whole[:2] == parts[:2]
    assert whole[2:] != parts[2:]


class NoiseAhead(NoiseAtOnce):
    """Reads ahead, seeds each sample, and may skip some, as S3ImageFolder."""

    may_skip = True

    def fetch_seeded(self, indices: Any, before_each: Any = None) -> tuple[range, list[Any]]:
        samples = []
        for position, index in enumerate(indices):
            before_each(position)
            samples.append(self[index])
        return range(len(indices)), samples


def test_a_users_subset_of_images_is_read_as_torchs_own() -> None:
    """Ahead of use, each sample seeded by itself, and skipping is known of."""
    for subset in (Subset(NoiseAhead(8), range(8)), Part(NoiseAhead(8), range(8))):
        assert _drawn(subset, [[0, 1, 2, 3]]) == _drawn(subset, [[0, 1], [2, 3]])
        assert may_skip(subset)


class Exhausted(Numbers):
    """Raises StopIteration at sample 5, as a bare `next` does."""

    def __getitem__(self, index: int) -> int:
        return index if index != 5 else next(iter(()))


class ExhaustedShards:
    """Raises StopIteration when its second shard is opened."""

    def shards(self) -> list[int]:
        return [0, 1]

    def num_samples(self, shard: int) -> int:
        return 4

    def iter_shard(self, shard: int) -> Iterator[int]:
        return iter([0] * 4) if shard == 0 else next(iter(()))


def _exhausted(samples: list[int]) -> list[int]:
    return samples if 5 not in samples else next(iter(()))


@pytest.mark.parametrize("size", [2, 8], ids=["in mid-epoch", "in the first batch"])
@pytest.mark.parametrize("is_lockstep", [False, True])
@pytest.mark.parametrize(
    ("dataset", "collate", "name"),
    [
        (Exhausted(8), None, "Exhausted"),
        (Subset(Exhausted(8), range(8)), None, "Subset"),
        (Numbers(8), _exhausted, "_exhausted"),
        (ExhaustedShards(), None, "ExhaustedShards"),
    ],
)
def test_a_stop_iteration_of_the_users_code_is_an_error_that_names_it(
    *, dataset: Any, collate: Any, name: str, size: int, is_lockstep: bool
) -> None:
    """It would end the epoch without a word."""
    options = {"rank": 0, "world_size": 1, "shuffle": False, "collate_fn": collate}
    loader = RankLoader(dataset, global_batch_size=size, **options)
    with pytest.raises(RuntimeError, match=f"^{name} raised StopIteration, reading "):
        list(loader.lockstep(0) if is_lockstep else loader)


def test_a_pass_that_ends_before_its_last_batch_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever ended it; ranks with and without a share of the tail count their own batches."""
    loaders = _loaders(9, 4, 3)
    assert [len(list(loader)) for loader in loaders] == [3, 2, 2]
    whole = DataLoader.__iter__
    monkeypatch.setattr(DataLoader, "__iter__", lambda loader: islice(whole(loader), 1))
    with pytest.raises(RuntimeError, match="ended after 1 of 2 batches"):
        list(loaders[1])
    with pytest.raises(RuntimeError, match="ended after 1 of 3 batches"):
        list(loaders[1].lockstep(0))
