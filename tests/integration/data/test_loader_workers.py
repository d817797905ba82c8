"""The rank's loader gives the same order and the same draws with and without workers."""

import multiprocessing
import random
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from prefect_torch_ddp.errors import InvalidParamsError
from tests.unit.data.test_loader import Noise, Numbers, loader_of, walk
from tests.unit.data.test_lookahead import check_rank_loader, check_stock_loader
from tests.unit.data.test_none_samples import broken, drop
from tests.unit.data.test_shards import Noisy

FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}


@pytest.mark.extended
def test_order_is_the_same_with_worker_processes() -> None:
    """Workers yield the same batches, and forked ones need no pickle and inherit no torch mode."""
    dataset = Numbers(23, transform=lambda i: 10 * i + len(_get_current_function_mode_stack()))
    expected = [data.tolist() for data in loader_of(dataset, 6, rank=1, world_size=2)]
    assert all(number % 10 == 0 for batch in expected for number in batch)
    loader = loader_of(dataset, 6, rank=1, world_size=2, prefetch_factor=3, **FORKED)
    assert [data.tolist() for data in loader] == expected
    assert [data.tolist() for data, _ in loader.lockstep(0, 2)] == expected[2:]
    spawned = {"num_workers": 2, "multiprocessing_context": "spawn"}
    expected = [data.tolist() for data in loader_of(Numbers(23), 6, rank=1, world_size=2)]
    loader = loader_of(Numbers(23), 6, rank=1, world_size=2, **spawned)
    assert [data.tolist() for data in loader] == expected


class Blocks(Numbers):
    """Samples large enough to go through shared memory."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1024,), index)


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_batches_stay_as_they_came(prefetch_factor: int) -> None:
    """Batches don't change while they wait, or after a pass was left."""
    options = {**FORKED, "persistent_workers": True, "prefetch_factor": prefetch_factor}
    loader = loader_of(Blocks(48), 2, **options)
    plain = loader_of(Blocks(48), 2)
    for epoch in range(2):
        left = [batch for batch, _ in islice(loader.lockstep(epoch), 5)]
        whole = [batch for batch, _ in loader.lockstep(epoch)]
        expected = [batch for batch, _ in plain.lockstep(epoch)]
        assert torch.equal(torch.stack(whole), torch.stack(expected))
        assert torch.equal(torch.stack(left), torch.stack(expected[:5]))


class Loaded(Numbers):
    """Reads another dataset with its own loader, which has no workers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        (batch,) = loader_of(Blocks(2), 2, shuffle=False)
        return batch + index


def test_a_loader_may_be_read_in_the_worker_of_another() -> None:
    """A loader inside a worker sends its batches to no other process."""
    (here,), (there,) = (loader_of(Loaded(4), 4, **workers) for workers in ({}, FORKED))
    assert torch.equal(here, there)


def epoch_of(
    dataset: Dataset[Any], num_workers: int, start: int = 0, epoch: int = 2, **options: Any
) -> list[Any]:
    """Load an epoch of batches of 5 by so many worker processes."""
    workers = {**FORKED, "num_workers": num_workers, "seed": 7, **options}
    return [data for data, _ in loader_of(dataset, 5, **workers).lockstep(epoch, start)]


def test_augmentation_is_the_same_on_resume_and_for_any_number_of_workers() -> None:
    """A sample's randomness depends only on seed, epoch and index, also in persistent workers."""
    kept = loader_of(Noise(30), 5, seed=7, persistent_workers=True, **FORKED)
    whole, third = ([data for data, _ in kept.lockstep(epoch)] for epoch in (2, 3))
    assert torch.equal(torch.cat(whole[2:]), torch.cat(epoch_of(Noise(30), 1, start=2)))
    assert torch.equal(torch.cat(third), torch.cat(epoch_of(Noise(30), 2, epoch=3)))
    noise = torch.cat(whole)[:, 1:]
    assert len(noise.unique()) == noise.numel(), "no two draws are equal"
    for other in (third, epoch_of(Noise(30), 2, seed=8)):
        drawn = torch.cat(other)[:, 1:]
        assert not torch.isin(drawn, noise).any(), "each epoch, and each seed, draws anew"


def _with_draws(samples: list[torch.Tensor]) -> tuple[float, ...]:
    return random.random(), np.random.rand(), torch.rand(()).item()


class Quiet(Numbers):
    """Draws only from torch's generator, as most augmentations do."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item()])


@pytest.mark.parametrize(
    "dataset", [Quiet(30), Noise(30), Noisy([7, 9, 14])], ids=["torch", "all", "shards"]
)
def test_what_collating_draws_is_the_same_for_any_number_of_workers(dataset: Dataset[Any]) -> None:
    """Draws in `collate_fn` follow from the batch's last sample, also after a resume."""
    two = epoch_of(dataset, 2, collate_fn=_with_draws)
    assert epoch_of(dataset, 1, collate_fn=_with_draws) == two
    assert epoch_of(dataset, 1, start=3, collate_fn=_with_draws) == two[3:]


def test_only_what_draws_needs_to_be_seeded() -> None:
    """Unseeded samples keep their order, but their draws depend on the number of workers."""

    def whole(dataset: Dataset[Any], num_workers: int, seed_samples: Any) -> torch.Tensor:
        return torch.cat(epoch_of(dataset, num_workers, seed_samples=seed_samples))

    one, two = (whole(Noise(30), num_workers, seed_samples=False) for num_workers in (1, 2))
    seeded, by_torch = whole(Noise(30), 2, seed_samples=True), whole(Noise(30), 1, "torch")
    assert torch.equal(one[:, 0], seeded[:, 0])
    assert torch.equal(two[:, 0], seeded[:, 0])
    assert not torch.equal(one, two)
    assert torch.equal(by_torch[:, 3], seeded[:, 3])
    assert not torch.isin(by_torch[:, 1], seeded[:, 1]).any()


def test_a_none_in_a_worker_is_an_error_of_the_rank() -> None:
    """The error isn't wrapped in the worker's, so its text begins with the cause."""
    loader = loader_of(broken(), 8, 0, 2, shuffle=False, collate_fn=drop, **FORKED)
    with pytest.raises(InvalidParamsError, match=r"^sample 1 of the dataset is None"):
        list(loader.lockstep(0))
    whole = loader_of(Subset(broken(), [0, 2, 3, 4]), 4, 0, 2, collate_fn=drop, **FORKED)
    assert [len(labels) for (_, labels), _ in whole.lockstep(0)] == [2]


def _shift(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.transform = [100, 200][info.dataset.num - 6 + info.id].__add__


def test_worker_init_fn_reaches_the_users_dataset() -> None:
    """`worker_init_fn` gets the user's dataset, as with a plain DataLoader."""
    arguments: dict[str, Any] = {"worker_init_fn": _shift, "num_workers": 1}
    plain = [data.tolist() for data in DataLoader(Numbers(6), batch_size=3, **arguments)]
    ours = loader_of(Numbers(6), 3, shuffle=False, **arguments)
    assert [data.tolist() for data in ours] == plain
    assert plain == [[100, 101, 102], [103, 104, 105]]


class Records(Numbers):
    """Reads its samples from a file that it has held open from the start, place by place.

    In worker processes, two, each seeks before any reads.
    """

    def __init__(self, path: Path, num: int) -> None:
        super().__init__(num)
        path.write_bytes(bytes(range(num)))
        self.file = path.open("rb", buffering=0)
        self.both = multiprocessing.get_context("fork").Barrier(2)

    def __getitem__(self, index: int) -> int:
        self.file.seek(index)
        if get_worker_info() is not None:
            self.both.wait(60)
        return self.file.read(1)[0]


def test_a_file_that_a_dataset_holds_open_is_each_workers_own(tmp_path: Path) -> None:
    """Workers that read at the same time get the bytes of their own samples."""
    dataset = Records(tmp_path / "numbers", 32)
    with dataset.file:
        loader = loader_of(dataset, 4, shuffle=False, **FORKED)
        assert [int(each) for batch in loader for each in batch] == list(range(32))
        dataset.file.seek(7)
        loader = loader_of(Lines(dataset.file), 1, shuffle=False, **FORKED)
        assert [int(each) for batch in loader for each in batch] == [7, 7]


class Lines(Numbers):
    """Reads on in a file that is open."""

    def __init__(self, file: FileIO) -> None:
        super().__init__(2)
        self.file = file

    def __getitem__(self, index: int) -> int:
        return self.file.read(1)[0]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3:UserWarning")
def test_each_process_is_told_its_next_batch() -> None:
    """The stock DataLoader and the rank's announce batches, also to persistent workers."""
    check_stock_loader(3, multiprocessing_context="fork", persistent_workers=True)
    check_rank_loader(3, multiprocessing_context="fork")


def test_what_a_sharded_dataset_draws_is_the_same_in_workers() -> None:
    """Two ranks draw the same from the middle of an epoch on."""
    dataset = Noisy([7, 9, 3, 11], 5)
    assert walk(dataset, 6, 2, start=3, **FORKED) == walk(dataset, 6, 1)[3:]


@pytest.mark.parametrize("num_inner", [1, 3], ids=["left after a batch", "whole"])
def test_a_pass_within_a_pass_of_persistent_workers_is_refused(num_inner: int) -> None:
    """The outer pass raises before it yields a batch of the inner one, and says what to do."""
    loader = loader_of(Noise(30), 10, seed=7, persistent_workers=True, **FORKED)
    outer = loader.lockstep(0)
    next(outer)
    inner = iter(loader)
    assert len([next(inner) for _ in range(num_inner)]) == num_inner
    with pytest.raises(InvalidParamsError, match=r"another pass .* began after 1 of 3 batches"):
        next(outer)
    plain = loader_of(Noise(30), 10, seed=7, **FORKED)
    assert [len(list(plain)) for _ in plain] == [3, 3, 3]
