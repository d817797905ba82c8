"""The rank's loader with worker processes: the same order, and the same draws, as without."""

import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import DataLoader, Dataset, get_worker_info

from prefect_torch_ddp.data.loader import RankLoader
from tests.unit.data.test_loader import Noise, Numbers
from tests.unit.data.test_lookahead import check_rank_loader, check_stock_loader
from tests.unit.data.test_shards import Noisy, batches

FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}
SPAWNED = {"num_workers": 2, "multiprocessing_context": "spawn"}


def loader_of(
    dataset: Dataset[Any], size: int, rank: int = 0, world_size: int = 1, **options: Any
) -> RankLoader:
    """Make a rank's loader."""
    return RankLoader(dataset, global_batch_size=size, rank=rank, world_size=world_size, **options)


@pytest.mark.parametrize("workers", [FORKED, SPAWNED], ids=["fork", "spawn"])
def test_order_is_the_same_with_worker_processes(workers: dict[str, Any]) -> None:
    """Fork and spawn workers with prefetch yield what no worker yields. A lambda needs no
    pickle where workers are forked."""
    is_forked = workers is FORKED
    dataset = Numbers(23, transform=lambda i: i * 10) if is_forked else Numbers(23)
    expected = [data.tolist() for data in loader_of(dataset, 6, rank=1, world_size=2)]
    loader = loader_of(dataset, 6, rank=1, world_size=2, prefetch_factor=3, **workers)
    assert [data.tolist() for data in loader] == expected
    assert [data.tolist() for data, _ in loader.lockstep(0, 2)] == expected[2:]


def test_persistent_workers_follow_the_epoch() -> None:
    """Workers that live on yield each epoch's own order and augmentation."""
    kept = loader_of(Noise(12), 4, persistent_workers=True, **FORKED)
    fresh = loader_of(Noise(12), 4, **FORKED)
    for epoch in (1, 2):
        left, right = ([data for data, _ in loader.lockstep(epoch)] for loader in (kept, fresh))
        assert torch.equal(torch.cat(left), torch.cat(right))


class Blocks(Numbers):
    """Samples that a batch of is kept in shared memory by its worker until the rank has it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1024,), index)


def _num_kept_by_workers() -> int:
    """Return how many pieces of shared memory they have made and still keep."""
    return sum(
        f"/torch_{worker.pid}_" in str(link.readlink())
        for worker in psutil.Process().children()
        for link in Path(f"/proc/{worker.pid}/fd").iterdir()
    )


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_batches_stay_as_they_came(prefetch_factor: int) -> None:
    """Also those that wait long, and after a pass that was left; an idle worker keeps no more
    of them than it may be ahead."""
    options = {**FORKED, "persistent_workers": True, "prefetch_factor": prefetch_factor}
    loader = loader_of(Blocks(48), 2, **options)
    plain = loader_of(Blocks(48), 2)
    for epoch in range(2):
        left = [batch for batch, _ in islice(loader.lockstep(epoch), 5)]
        whole = [batch for batch, _ in loader.lockstep(epoch)]
        expected = [batch for batch, _ in plain.lockstep(epoch)]
        assert torch.equal(torch.stack(whole), torch.stack(expected))
        assert torch.equal(torch.stack(left), torch.stack(expected[:5]))
        assert 0 < _num_kept_by_workers() <= 2 * prefetch_factor


class Loaded(Numbers):
    """Reads another dataset, by a loader of its own without workers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        (batch,) = loader_of(Blocks(2), 2, shuffle=False)
        return batch + index


def test_a_loader_may_be_read_in_the_worker_of_another() -> None:
    """As without workers: its batches go to no other process."""
    (here,), (there,) = (loader_of(Loaded(4), 4, **workers) for workers in ({}, FORKED))
    assert torch.equal(here, there)


class Modes(Numbers):
    """Tells through how many modes each operation of torch goes."""

    def __getitem__(self, index: int) -> int:
        return len(_get_current_function_mode_stack())


def test_workers_begin_under_no_mode_of_ours() -> None:
    """A forked worker inherits them, and each operation on its images would take a detour
    through Python."""
    loader = loader_of(Modes(8), 4, **FORKED)
    assert [batch.tolist() for batch in loader] == [[0] * 4] * 2


def test_augmentation_is_the_same_on_resume_and_for_any_number_of_workers() -> None:
    """With augmentation in workers a sample's randomness follows from seed, epoch and index
    alone."""

    def epoch_of(epoch: int, start: int, seed: int = 7, **kwargs: Any) -> list[torch.Tensor]:
        loader = loader_of(Noise(30), 5, seed=seed, **kwargs)
        return [data for data, _ in loader.lockstep(epoch, start)]

    whole = epoch_of(2, 0, **FORKED)
    one_worker = {**FORKED, "num_workers": 1}
    assert torch.equal(torch.cat(whole[2:]), torch.cat(epoch_of(2, 2, **one_worker)))
    noise = torch.cat(whole)[:, 1:]
    assert len(noise.unique()) == noise.numel(), "no two draws are equal"
    for other in (epoch_of(3, 0, **FORKED), epoch_of(2, 0, seed=8, **FORKED)):
        drawn = torch.cat(other)[:, 1:]
        assert not torch.isin(drawn, noise).any(), "each epoch, and each seed, draws anew"


def _with_draws(samples: list[torch.Tensor]) -> tuple[torch.Tensor, float, float, float]:
    return torch.stack(samples), random.random(), np.random.rand(), torch.rand(()).item()


class Quiet(Numbers):
    """Draws from torch's generator alone, as most augmentations do."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, torch.rand(()).item()])


@pytest.mark.parametrize("dataset", [Quiet(30), Noise(30)], ids=["torch", "all"])
def test_what_collating_draws_is_the_same_for_any_number_of_workers(dataset: Dataset[Any]) -> None:
    """It follows from the batch's last sample, from all three generators, also after a
    resume."""

    def epoch_of(num_workers: int, start: int = 0) -> list[tuple[float, ...]]:
        workers = {**FORKED, "num_workers": num_workers, "collate_fn": _with_draws}
        loader = loader_of(dataset, 5, seed=7, **workers)
        return [draws for (_, *draws), _ in loader.lockstep(2, start)]

    assert epoch_of(1) == epoch_of(2)
    assert epoch_of(2)[3:] == epoch_of(1, 3)


def test_only_what_draws_needs_to_be_seeded() -> None:
    """Unseeded samples come in the same order; what they draw differs by the number of workers
    then."""

    def epoch_of(dataset: Dataset[Any], num_workers: int, *, seed_samples: Any) -> torch.Tensor:
        workers = {**FORKED, "num_workers": num_workers, "seed_samples": seed_samples}
        loader = loader_of(dataset, 5, seed=7, **workers)
        return torch.cat([data for data, _ in loader.lockstep(2)])

    one, two = (epoch_of(Noise(30), num_workers, seed_samples=False) for num_workers in (1, 2))
    seeded = epoch_of(Noise(30), 2, seed_samples=True)
    assert torch.equal(one[:, 0], seeded[:, 0])
    assert torch.equal(two[:, 0], seeded[:, 0])
    assert not torch.equal(one, two)
    assert torch.equal(
        epoch_of(Quiet(30), 1, seed_samples="torch"), epoch_of(Quiet(30), 2, seed_samples=True)
    )
    by_torch = epoch_of(Noise(30), 2, seed_samples="torch")
    assert torch.equal(by_torch[:, 3], seeded[:, 3])
    assert not torch.isin(by_torch[:, 1], seeded[:, 1]).any()


def _shift(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.transform = [100, 200][info.dataset.num - 6 + info.id].__add__


def test_worker_init_fn_reaches_the_users_dataset() -> None:
    """What worker_init_fn reads from and sets on the worker's dataset is the user's own, as
    with a plain DataLoader."""
    arguments: dict[str, Any] = {"worker_init_fn": _shift, "num_workers": 1}
    plain = [data.tolist() for data in DataLoader(Numbers(6), batch_size=3, **arguments)]
    ours = loader_of(Numbers(6), 3, shuffle=False, **arguments)
    assert [data.tolist() for data in ours] == plain
    assert plain == [[100, 101, 102], [103, 104, 105]]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3:UserWarning")
@pytest.mark.parametrize("num_workers", [1, 3])
def test_each_process_is_told_its_next_batch(num_workers: int) -> None:
    """By the stock DataLoader and the rank's; persistent workers too."""
    check_stock_loader(num_workers, multiprocessing_context="fork", persistent_workers=True)
    check_rank_loader(num_workers, multiprocessing_context="fork")


def test_what_a_sharded_dataset_draws_is_the_same_in_workers() -> None:
    """From the middle on, on two ranks."""
    dataset = Noisy([7, 9, 3, 11], 5)
    assert batches(dataset, 6, 2, start=3, **FORKED) == batches(dataset, 6, 1)[3:]
