"""The exact order: each sample once per epoch, the same global batches for every world size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_torch_ddp.data.sampler import GlobalBatches, mix_seed, share_range
from prefect_torch_ddp.errors import InvalidParamsError

SIZES = st.integers(1, 200)
WORLD_SIZES = st.integers(1, 9)
EPOCHS = st.integers(0, 5)
SEEDS = st.integers(0, 2**63 - 1)


def _global_batch(batches: GlobalBatches, epoch: int, batch: int, world_size: int) -> list[int]:
    return [i for rank in range(world_size) for i in batches.share(epoch, batch, rank, world_size)]


@settings(max_examples=200, deadline=None)
@given(
    n=SIZES,
    size=st.integers(1, 50),
    worlds=st.tuples(WORLD_SIZES, WORLD_SIZES),
    epoch=EPOCHS,
    seed=SEEDS,
    drop=st.booleans(),
)
def test_same_global_batches_for_every_world_size(
    *, n: int, size: int, worlds: tuple[int, int], epoch: int, seed: int, drop: bool
) -> None:
    """Each sample once; a world of another size, in another process, cuts the same global
    batches in the same order."""
    drop = drop and n >= size
    shuffle = epoch != 1
    one, other = (GlobalBatches(n, size, seed, shuffle, drop_last=drop) for _ in range(2))
    seen = [i for batch in range(one.num_batches) for i in _global_batch(one, epoch, batch, 1)]
    assert len(set(seen)) == len(seen) == n - (n % size if drop else 0)
    assert shuffle or seen == list(range(len(seen)))
    for batch in range(one.num_batches):
        left, right = (
            _global_batch(batches, epoch, batch, world)
            for batches, world in zip((one, other), worlds, strict=True)
        )
        assert left == right
        assert len(left) == one.num_global(batch)
        assert len(left) == size or (
            not drop and batch == one.num_batches - 1 and len(left) == n % size
        )


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
    """Reshuffled every epoch, reproducible by seed; going back to an earlier epoch gives
    its order again."""
    batches = GlobalBatches(100, 100, seed=3)
    orders = [batches.share(epoch, 0, 0, 1) for epoch in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    assert [batches.share(epoch, 0, 0, 1) for epoch in range(4)] == orders
    assert GlobalBatches(100, 100, seed=4).share(0, 0, 0, 1) not in orders


def test_the_order_is_the_same_in_every_process_for_ever() -> None:
    """A checkpoint of today must resume in the same order tomorrow: the mix of seeds is
    pinned."""
    assert mix_seed(0, 1) == 6096812863120040317
    assert mix_seed(1, 2) != mix_seed(2, 1)
    assert mix_seed(1, 12) != mix_seed(11, 2)


@pytest.mark.parametrize(
    ("num_samples", "size", "drop_last", "words"),
    [
        (0, 4, False, "0 samples"),
        (10, 0, False, "global_batch_size is 0"),
        (3, 4, True, "drop_last leaves no batch"),
    ],
)
def test_sizes_that_cannot_work_are_refused(
    *, num_samples: int, size: int, drop_last: bool, words: str
) -> None:
    """The message says which number is wrong."""
    with pytest.raises(InvalidParamsError, match=words):
        GlobalBatches(num_samples, size, drop_last=drop_last)
