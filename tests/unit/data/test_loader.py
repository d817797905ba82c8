"""A rank's loader: the exact order, in lockstep over ranks, from any batch on; what is refused."""

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

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
from prefect_torch_ddp.data.sampler import BatchKeys, GlobalBatches, mix_seed, share_range
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
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Stream(IterableDataset[int]):
    """Has no length, no order and no shards."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def loader_of(
    dataset: Any, size: int, rank: int = 0, world_size: int = 1, **options: Any
) -> RankLoader:
    """Make a rank's loader."""
    return RankLoader(dataset, global_batch_size=size, rank=rank, world_size=world_size, **options)


def walk(
    dataset: Any, size: int, world: int, epoch: int = 0, start: int = 0, **options: Any
) -> list[list[Any]]:
    """Walk all ranks in lockstep; return the samples that count, a list for each global batch."""
    loaders = [loader_of(dataset, size, rank, world, **options) for rank in range(world)]
    steps = zip(*(loader.lockstep(epoch, start) for loader in loaders), strict=True)
    batches = []
    for batch, step in enumerate(steps, start):
        counted = [i for data, share in step for i in data[: share.num_local].tolist()]
        for data, share in step:
            is_last = batch == len(loaders[0]) - 1
            assert (share.epoch, share.batch, share.is_last) == (epoch, batch, is_last)
            assert share.num_global == len(counted)
            assert len(data) == max(share.num_local, 1)
            assert all(sample in counted for sample in data.tolist()), "a stand-in of another batch"
        batches.append(counted)
    return batches


@settings(max_examples=100, deadline=None)
@given(
    num=st.integers(1, 60),
    size=st.integers(1, 20),
    worlds=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 2**63 - 1),
    is_drawn=st.tuples(st.booleans(), st.booleans()),
    data=st.data(),
)
def test_lockstep_resumes_to_the_uninterrupted_suffix_at_any_world_size(
    *, num, size, worlds, epoch, seed, is_drawn, data
) -> None:
    """Each sample once, equally many batches on each rank; a resume at another world size
    continues the same global batches."""
    shuffle, drop_last = is_drawn[0], is_drawn[1] and num >= size
    options = {"epoch": epoch, "seed": seed, "shuffle": shuffle, "drop_last": drop_last}
    whole = walk(Numbers(num), size, worlds[0], **options)
    seen = [i for batch in whole for i in batch]
    assert len(set(seen)) == len(seen) == num - (num % size if drop_last else 0)
    assert set(seen) <= set(range(num))
    assert shuffle or seen == sorted(seen)
    assert all(len(batch) == size for batch in whole[: num // size])
    start = data.draw(st.integers(0, len(whole)))
    assert walk(Numbers(num), size, worlds[1], start=start, **options) == whole[start:]


@given(num=st.integers(0, 1000), world=st.integers(1, 64))
def test_shares_differ_by_at_most_one_and_rank_0_has_the_largest(num: int, world: int) -> None:
    """A share is never padded; rank 0, whose BatchNorm buffers the others take over, never has
    an empty one."""
    shares = [share_range(num, rank, world) for rank in range(world)]
    assert [i for share in shares for i in share] == list(range(num))
    lengths = [len(share) for share in shares]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] == max(lengths)


def test_epochs_and_seeds_give_different_orders_and_repeat() -> None:
    """Reshuffled every epoch, reproducible by seed, also when an earlier epoch comes again. A
    checkpoint of today must resume in the same order tomorrow: the mix of seeds is pinned."""
    batches = GlobalBatches(100, 100, seed=3)
    orders = [batches.share(epoch, 0, 0, 1) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    assert [batches.share(epoch, 0, 0, 1) for epoch in range(4)] == orders
    assert GlobalBatches(100, 100, seed=4).share(0, 0, 0, 1) not in orders
    assert mix_seed(0, 1) == 6096812863120040317
    assert mix_seed(1, 2) != mix_seed(2, 1)
    assert mix_seed(1, 12) != mix_seed(11, 2)


def test_resume_does_not_load_the_skipped_batches() -> None:
    """Starting at batch 3 of 5 reads two batches. The order that torch keeps may be named."""
    dataset = Numbers(10)
    loader = loader_of(dataset, 2, shuffle=False, in_order=True)
    assert [data.tolist() for data, _ in loader.lockstep(0, 3)] == [[6, 7], [8, 9]]
    assert dataset.read == [6, 7, 8, 9]
    assert list(loader.lockstep(0, 5)) == []
    with pytest.raises(InvalidParamsError, match="can't start at batch 6: an epoch has 5"):
        loader.lockstep(0, 6)


def test_a_loop_of_ones_own_shuffles_and_augments_each_epoch_anew() -> None:
    """As people expect of shuffling; each rank's pass is the same epoch, also without a batch."""
    loaders = [loader_of(Numbers(9), 4, rank, 5) for rank in range(5)]
    passes = [[i for loader in loaders for data in loader for i in data.tolist()] for _ in "abc"]
    assert all(sorted(samples) == list(range(9)) for samples in passes)
    assert len({tuple(samples) for samples in passes}) == 3
    noise = loader_of(Noise(3), 2, shuffle=False, virtual_ranks=1)  # seeded here too
    drawn = [[data[:, 1:].tolist() for data in noise] for _ in "ab"]
    assert drawn[0] != drawn[1]


def test_a_pass_counts_once_its_second_batch_is_asked_for() -> None:
    """One rank may look at a first batch; a loop that is left early is an epoch nevertheless."""
    loader = loader_of(Numbers(8), 2)
    next(iter(loader))
    assert loader.epoch == 0
    assert len(list(islice(loader, 2))) == 2
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
    list(loader_of(Numbers(9), 2, world_size=2).lockstep(1))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_default_device_of_the_user_does_not_matter() -> None:
    """The loader works under `torch.set_default_device`, with "meta" in place of a GPU."""
    with torch.device("meta"):
        loader = loader_of(Numbers(5), 5, collate_fn=list)
        assert [sorted(data) for data in loader] == [[0, 1, 2, 3, 4]]


class NoiseAtOnce(Noise):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class NoiseAhead(NoiseAtOnce):
    """Reads ahead, seeds each sample, and may skip some, as S3ImageFolder."""

    may_skip = True

    def fetch_seeded(self, indices: Any, before_each: Any = None) -> tuple[range, list[Any]]:
        samples = []
        for position, index in enumerate(indices):
            before_each(position)
            samples.append(self[index])
        return range(len(indices)), samples


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (
        Stream(),
        {},
        r"Stream is an IterableDataset.*shards\(\).*num_samples\(shard\).*iter_shard\(shard\)",
    ),
    (object(), {}, "object has no __len__"),
    (Numbers(0), {}, "0 samples"),
    (Numbers(3), {"global_batch_size": 0}, "global_batch_size is 0"),
    (Numbers(3), {"global_batch_size": 2.5}, r"global_batch_size is 2\.5; give a whole number"),
    (TensorDataset(torch.ones(3)), {"drop_last": True}, "drop_last leaves no batch"),
    (Numbers(3), {"batch_size": 2}, "batch_size can't be passed"),
    (Numbers(3), {"sampler": [1], "batch_sampler": []}, "batch_sampler, sampler can't be passed"),
    (Numbers(3), {"generator": torch.Generator()}, "generator can't be passed"),
    # They would be counted wrongly, and lost or repeated at a resume.
    (Numbers(3), {"in_order": False}, "in_order=False .* lost or repeated at a resume"),
    (Numbers(3), {"seed_samples": "numpy"}, "choose True, 'torch' or False"),
    (Numbers(3), {"seed_samples": False, "virtual_ranks": 1}, "can't be used with determinism"),
    (Subset(NoiseAhead(3), [1]), {"virtual_ranks": 1}, "can't be used with determinism='elastic'"),
    (Numbers(3), {"rank": 2, "world_size": 2}, "rank is 2 and world_size is 2"),
]


@pytest.mark.parametrize(("dataset", "kwargs", "words"), REFUSED)
def test_what_cannot_work_is_refused_at_once(
    dataset: Any, kwargs: dict[str, Any], words: str
) -> None:
    """Before a worker process starts, with the name of what is wrong, and the way out."""
    with pytest.raises(InvalidParamsError, match=words):
        RankLoader(dataset, **{"global_batch_size": 4, "rank": 0, "world_size": 1, **kwargs})


@pytest.mark.parametrize("num", [7, 9])
def test_a_dataset_may_grow_but_not_shrink(num: int) -> None:
    """What came later isn't used; some too many would be asked for at the next epoch."""
    dataset = Numbers(8)
    loader = RankLoader(dataset, global_batch_size=4, rank=0, world_size=1)
    batches = iter(loader)
    next(batches)
    dataset.num = num
    assert len(list(batches)) == 1
    if num < 8:
        with pytest.raises(InvalidParamsError, match=f"has {num} samples now and had 8 when"):
            next(loader.lockstep(1))
    else:
        assert len(list(loader.lockstep(1))) == 2


class Part(Subset[Any]):
    """A user's own Subset."""


def drawn_of(dataset: Any, shares: list[list[int]]) -> list[str]:
    """Fetch the samples of these shares of a batch, as a worker process would."""
    seeded = SeededDataset(dataset, 1, seed_samples=True, seeds_here=True, stands_in=False)
    keys = [BatchKeys(0, share, is_training=False) for share in shares]
    with generators_kept():
        return [str(sample) for each in keys for sample in seeded.__getitems__(each).data]


@pytest.mark.parametrize(
    ("dataset", "by_sample"),
    [
        (Noise(8), True),
        (Subset(Noise(8), range(8)), True),
        (Part(Noise(8), range(8)), True),
        (random_split(Noise(8), [8, 0], torch.Generator())[0], True),
        (Subset(Subset(Noise(9), range(9)), range(8)), True),
        (StackDataset(Noise(8), Subset(Noise(8), range(8))), True),
        (Subset(StackDataset(a=Noise(8), b=Noise(8)), range(8)), True),
        (Subset(NoiseAhead(8), range(8)), True),
        (Part(NoiseAhead(8), range(8)), True),
        (Subset(NoiseAtOnce(8), range(8)), False),
    ],
)
def test_what_a_sample_draws_follows_from_the_sample_alone(dataset: Any, by_sample: bool) -> None:
    """Else augmentation depended on how many ranks share the batch. What reads a batch at once is
    asked for the whole batch, and seeded for each."""
    whole, parts = drawn_of(dataset, [[0, 1, 2, 3]]), drawn_of(dataset, [[0, 1], [2, 3]])
    assert whole[:2] == parts[:2]
    assert (whole[2:] == parts[2:]) is by_sample
    assert may_skip(dataset) is isinstance(getattr(dataset, "dataset", None), NoiseAhead)


class Doubled(TensorDataset):
    """Has separate samples."""

    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Backwards(TensorDataset):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices[::-1]]


class Untidy(TensorDataset):
    """Holds what isn't a tensor."""

    def __init__(self) -> None:
        self.tensors = torch.arange(12), np.arange(12)  # type: ignore[assignment]


def _tensors() -> list[torch.Tensor]:
    images = torch.arange(12 * 16.0).reshape(12, 4, 2, 2)
    others = images.to(memory_format=torch.channels_last), images[:, ::2], images.bfloat16()
    flat = torch.arange(12), torch.randn(12, 0), torch.randn(12, requires_grad=True)
    return [images, *others, *flat, torch.randn(12, 3, 4, 2, 2)]


PLAIN = TensorDataset(*_tensors())
CHOICES: list[tuple[Any, bool]] = [
    (torch.randperm(12).tolist(), True),
    (torch.randperm(12), True),
    (np.arange(12, dtype=np.uint16), True),
    ([-1, *range(10), 3], False),
    (torch.arange(12).int(), False),
    (torch.arange(12)[:, None], False),
    (np.arange(12)[:, None], False),
    ([slice(i, i + 2) for i in [*range(11), 3]], False),
]


@pytest.mark.parametrize(
    ("dataset", "at_once"),
    [
        *((Subset(PLAIN, chosen), at_once) for chosen, at_once in CHOICES),
        (PLAIN, True),
        (Subset(Part(PLAIN, range(12)), range(12)), True),
        (random_split(PLAIN, [12, 0], torch.Generator())[0], True),
        (TensorDataset(torch.randn(12, 3, 2, 2, 4).permute(0, 1, 4, 2, 3)), False),
        (TensorDataset(torch.nn.Parameter(torch.randn(12))), False),
        (Untidy(), False),
        (Doubled(*_tensors()), False),
        (Backwards(torch.arange(12)), False),
    ],
)
def test_batches_of_tensors_are_those_of_a_dataloader(dataset: Any, at_once: bool) -> None:
    """To the strides, by which a convolution chooses how to add up."""
    loader = loader_of(dataset, 10, rank=1, world_size=2, keep_ids=True)
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
    """By a `collate_fn`, which is given the samples, each a tuple; or as the docstring of
    default_collate shows it."""
    given: list[Any] = []
    dataset = TensorDataset(torch.arange(4), torch.ones(4))
    list(loader_of(dataset, 4, shuffle=False, collate_fn=given.append))
    assert given == [[(torch.tensor(i), torch.tensor(1.0)) for i in range(4)]]
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, **_: len(batch))
    assert list(loader_of(dataset, 4)) == [[4, 4]]


def test_an_index_out_of_range_is_named_as_by_torch() -> None:
    """With the number, as somebody has taken another dataset's indices."""
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        next(iter(loader_of(Subset(TensorDataset(torch.arange(3)), [0, 1, 7]), 3)))


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
    loader = loader_of(dataset, size, shuffle=False, collate_fn=collate)
    with pytest.raises(RuntimeError, match=f"^{name} raised StopIteration, reading "):
        list(loader.lockstep(0) if is_lockstep else loader)


def test_a_pass_that_ends_before_its_last_batch_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever ended it; ranks with and without a share of the tail count their own batches."""
    loaders = [loader_of(Numbers(9), 4, rank, 3) for rank in range(3)]
    assert [len(list(loader)) for loader in loaders] == [3, 2, 2]
    assert [len(loader) for loader in loaders] == [3, 3, 3]
    whole = DataLoader.__iter__
    monkeypatch.setattr(DataLoader, "__iter__", lambda loader: islice(whole(loader), 1))
    with pytest.raises(RuntimeError, match="ended after 1 of 2 batches"):
        list(loaders[1])
    with pytest.raises(RuntimeError, match="ended after 1 of 3 batches"):
        list(loaders[1].lockstep(0))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python takes a shorter path itself")
def test_a_path_too_long_for_the_sockets_of_workers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker would drop its batch, for which its rank would wait for ever."""
    fits = "/" + 74 * "x"
    monkeypatch.setattr(tempfile, "tempdir", fits)
    loader_of(Numbers(8), 4, num_workers=2)
    monkeypatch.setattr(tempfile, "tempdir", f"{fits}x")
    loader_of(Numbers(8), 4)
    with pytest.raises(InvalidParamsError, match="Set TMPDIR to a shorter one"):
        loader_of(Numbers(8), 4, num_workers=2)
