"""The look-ahead: which batch a loader process gets next, read before it is asked for; bounded,
and gone when it ends."""

import pickle
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    get_worker_info,
)

from prefect_torch_ddp.data.lookahead import Ahead, LookAhead, ReadAhead, ahead_of
from tests.unit.data.test_loader import loader_of


class Told(Dataset):
    """A dataset whose samples are what it received: its process, the batch, and the batches
    that follow."""

    may_skip = False

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitems__(self, indices):
        worker = get_worker_info()
        following = [list(batch) for batch in getattr(indices, "following", ())]
        return 0 if worker is None else worker.id, list(indices), following

    def fetch_seeded(self, indices, before_each=None):
        return range(len(indices)), self.__getitems__(indices)


class Reading(Told):
    """A dataset that reads its batches ahead of use, and keeps which it read."""

    def __init__(self, num_samples, reads):
        super().__init__(num_samples)
        self.reads = reads
        self.ahead = ReadAhead(self.read)

    def read(self, indices):
        self.reads.append(list(indices))
        return list(indices)

    def fetch_seeded(self, indices, before_each=None):
        return range(len(indices)), self.ahead.read(indices)


def as_it_is(batch):
    """Collate nothing."""
    return batch


def check(seen, num_workers, num_batches):
    """Each process got its next batch, and no other; the last ones got nothing."""
    assert len(seen) == num_batches
    for worker in range(max(num_workers, 1)):
        own = [entry for entry in seen if entry[0] == worker]
        for (_, _, following), (_, batch, _) in pairwise(own):
            assert following == [batch]
        assert all(entry[2] == [] for entry in own[-1:])


def test_a_process_is_told_its_next_batch():
    """By a stock DataLoader and the rank's; from any batch of an epoch on."""
    check_stock_loader(num_workers=0)
    check_rank_loader(num_workers=0)


def check_stock_loader(num_workers, **options):
    """Read two epochs; each process gets its next batch."""
    dataset = Told(43)
    sampler = LookAhead(BatchSampler(RandomSampler(dataset), 4, drop_last=False), num_workers)
    options |= {"num_workers": num_workers, "collate_fn": as_it_is}
    loader = DataLoader(dataset, batch_sampler=sampler, **options)
    assert len(loader) == 11
    for _ in range(2):
        seen = list(loader)
        check(seen, num_workers, 11)
        assert sorted(index for _, batch, _ in seen for index in batch) == list(range(43))


def test_a_look_ahead_has_what_its_batch_sampler_has():
    """So a loader's epoch is set as without one, also after a copy was pickled."""
    inner = DistributedSampler(range(8), num_replicas=2, rank=0)
    sampler = LookAhead(BatchSampler(inner, 2, drop_last=False), 0)
    loader = DataLoader(range(8), batch_sampler=sampler)
    loader.batch_sampler.sampler.set_epoch(3)
    assert inner.epoch == 3
    copied = pickle.loads(pickle.dumps(sampler))
    assert (copied.batch_size, copied.sampler.epoch) == (2, 3)
    with pytest.raises(AttributeError, match="batch_sise"):
        _ = sampler.batch_sise


def check_rank_loader(num_workers, **options):
    """Read from several batches on; each process gets its next batch."""
    options |= {"num_workers": num_workers, "collate_fn": as_it_is}
    loader = loader_of(Told(43), 8, rank=1, world_size=2, **options)
    whole = [batch for (_, batch, _), _ in loader.lockstep(3)]
    for start in (0, 2, 5):
        seen = [data for data, _ in loader.lockstep(3, start)]
        check(seen, num_workers, 6 - start)
        assert [batch for _, batch, _ in seen] == whole[start:]


def test_a_subset_is_told_the_inner_indices():
    """Also a subset of a subset."""
    dataset = Subset(Subset(Told(100), range(50, 100)), [4, 3, 2, 1])
    loader = loader_of(dataset, 2, shuffle=False, collate_fn=as_it_is)
    assert list(loader) == [(0, [54, 53], [[52, 51]]), (0, [52, 51], [])]


@pytest.mark.parametrize(
    "chosen",
    [torch.tensor([4, 3, 2, 1]), [*torch.tensor([4, 3, 2, 1])], np.array([4, 3, 2, 1])],
    ids=["tensor", "list of tensors", "array"],
)
def test_a_subset_by_an_array_reads_each_sample_once(chosen):
    """A tensor equals no other one as a key, so a batch that was read ahead would be read again."""
    reads = []
    dataset = Subset(Reading(100, reads), chosen)
    loader = loader_of(dataset, 2, shuffle=False, collate_fn=as_it_is)
    assert list(loader) == [[4, 3], [2, 1]]
    assert sorted(map(tuple, reads)) == [(2, 1), (4, 3)]
    assert all(type(index) is int for batch in reads for index in batch)


def batches_ahead(num, depth):
    """Return the batches of an epoch, each with those that follow."""
    return [ahead_of([i], [[j] for j in range(i + 1, min(i + 1 + depth, num))]) for i in range(num)]


@pytest.mark.parametrize("depth", [1, 3])
def test_the_next_batches_are_read_while_one_is_used(depth):
    """So many and no more, each once, and no thread is left at the end."""
    begun = [threading.Event() for _ in range(10)]
    reads = []

    def read(indices):
        reads.append(indices[0])
        begun[indices[0]].set()
        return indices[0] * 10

    ahead = ReadAhead(read)
    for i, batch in enumerate(batches_ahead(10, depth)):
        assert ahead.read(batch) == i * 10
        last = min(i + depth, 9)
        assert all(event.wait(60) for event in begun[: last + 1])
        assert not any(event.is_set() for event in begun[last + 1 :])
    assert sorted(reads) == list(range(10))
    for thread in threading.enumerate():
        if thread.name == "ptd-ahead":
            thread.join(60)
            assert not thread.is_alive()


def test_an_error_is_raised_at_the_batch_that_it_belongs_to():
    """Not at the one before."""

    def read(indices):
        return 10 // (indices[0] - 2)

    ahead = ReadAhead(read)
    assert ahead.read(ahead_of([1], [[2]])) == -10
    with pytest.raises(ZeroDivisionError):
        ahead.read(ahead_of([2], [[3]]))
    assert ahead.read(Ahead([3])) == 10
