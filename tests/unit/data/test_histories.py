"""Nothing lost and nothing twice over whole histories: epochs, interruptions, steps made again,
other numbers of ranks."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data.loader import RankLoader
from prefect_torch_ddp.data.sampler import GlobalBatches
from prefect_torch_ddp.params import CheckpointParams

WORLD_SIZES = st.integers(1, 8)
SEEDS = st.integers(0, 2**63 - 1)


# ---- The order itself.


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 80), size=st.integers(1, 20), world=WORLD_SIZES, seed=SEEDS, data=st.data())
def test_what_was_asked_before_changes_no_share(
    *, n: int, size: int, world: int, seed: int, data: st.DataObject
) -> None:
    """A share follows from seed, epoch, batch and rank alone: asked in any order, of
    any epoch, it is what it is."""
    used = GlobalBatches(n, size, seed)
    places = st.tuples(
        st.integers(0, 3), st.integers(0, used.num_batches - 1), st.integers(0, world - 1)
    )
    for epoch, batch, rank in data.draw(st.lists(places, min_size=1, max_size=8)):
        assert used.share(epoch, batch, rank, world) == GlobalBatches(n, size, seed).share(
            epoch, batch, rank, world
        )


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 80),
    size=st.integers(1, 20),
    epoch=st.integers(0, 3),
    seed=SEEDS,
    shuffle=st.booleans(),
)
def test_drop_last_leaves_out_the_tail_of_the_same_order(
    *, n: int, size: int, epoch: int, seed: int, shuffle: bool
) -> None:
    """The full batches are those of the order without it; left out are fewer samples than a
    batch has, none twice."""
    if n < size:
        return
    whole, cut = (GlobalBatches(n, size, seed, shuffle, drop_last=drop) for drop in (False, True))
    kept = [cut.share(epoch, batch, 0, 1) for batch in range(cut.num_batches)]
    assert kept == [whole.share(epoch, batch, 0, 1) for batch in range(cut.num_batches)]
    assert all(len(batch) == size for batch in kept)
    assert n - len({i for batch in kept for i in batch}) == n % size


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 40), size=st.integers(1, 20), world=WORLD_SIZES, start=st.integers(0, 10))
def test_the_ranks_weights_add_up_to_one(*, n: int, size: int, world: int, start: int) -> None:
    """At every step the ranks' gradients, weighted by their shares, are one mean; a rank
    without a share has weight 0."""
    loaders = [
        RankLoader(TensorDataset(torch.arange(n)), global_batch_size=size, rank=r, world_size=world)
        for r in range(world)
    ]
    start = min(start, len(loaders[0]))
    steps = list(zip(*(loader.lockstep(0, start) for loader in loaders), strict=True))
    assert len(steps) == len(loaders[0]) - start
    for step in steps:
        (num_global,) = {share.num_global for _, share in step}
        assert sum(share.num_local for _, share in step) == num_global
        assert all(len(samples) == 1 for (samples,), share in step if share.num_local == 0)


# ---- Attempts of many sizes.


@dataclass(frozen=True)
class Attempt:
    """How many ranks it has, how many steps it makes, and how many of these are behind its last
    checkpoint."""

    world_size: int
    num_steps: int
    num_lost: int


ATTEMPTS = st.builds(Attempt, WORLD_SIZES, st.integers(0, 12), st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 30),
    size=st.integers(1, 9),
    attempts=st.lists(ATTEMPTS, max_size=6),
    last=WORLD_SIZES,
    seed=SEEDS,
)
def test_attempts_of_any_sizes_make_one_history(
    *, n: int, size: int, attempts: list[Attempt], last: int, seed: int
) -> None:
    """What survives of any attempts, each with its own number of ranks, is the undisturbed
    sequence of global batches."""
    epochs = 3
    order = GlobalBatches(n, size, seed)
    total = epochs * order.num_batches
    made: list[Counter[int]] = []
    for attempt in [*attempts, Attempt(last, total, 0)]:
        made += _make_steps(
            order, attempt.world_size, len(made), min(len(made) + attempt.num_steps, total)
        )
        if attempt.num_lost and len(made) < total:
            del made[-attempt.num_lost :]
    expected = [
        Counter(order.share(epoch, batch, 0, 1))
        for epoch in range(epochs)
        for batch in range(order.num_batches)
    ]
    assert made == expected
    for epoch in range(epochs):
        per_epoch = made[epoch * order.num_batches : (epoch + 1) * order.num_batches]
        assert sum(per_epoch, Counter()) == Counter(range(n))


def _make_steps(order: GlobalBatches, world_size: int, first: int, end: int) -> list[Counter[int]]:
    """Load the steps from `first` to `end` on all ranks; return the samples that count of
    each."""
    dataset = TensorDataset(torch.arange(order.num_samples))
    options = {
        "global_batch_size": order.global_batch_size,
        "world_size": world_size,
        "seed": order.seed,
    }
    loaders = [RankLoader(dataset, rank=rank, **options) for rank in range(world_size)]
    steps: list[Counter[int]] = []
    while first + len(steps) < end:
        epoch, batch = divmod(first + len(steps), len(loaders[0]))
        for step in zip(*(loader.lockstep(epoch, batch) for loader in loaders), strict=True):
            steps.append(
                Counter(
                    i for (samples,), share in step for i in samples[: share.num_local].tolist()
                )
            )
            if first + len(steps) == end:
                break
    return steps


# ---- The loop, with real checkpoints.


class DiedError(Exception):
    """In place of a kill: the rank closes as one that failed."""


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 12),
    size=st.integers(1, 5),
    every=st.integers(1, 4),
    epochs=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    deaths=st.lists(st.integers(1, 15), max_size=4),
)
def test_a_loop_that_dies_anywhere_ends_with_each_sample_once(
    *, n: int, size: int, every: int, epochs: tuple[int, int], deaths: list[int]
) -> None:
    """Two loops one after the other, dying at any steps: what the last attempt of each
    step saw is the whole order."""
    with TemporaryDirectory() as folder:
        steps: dict[int, tuple[int, list[int]]] = {}
        for death in [*deaths, None]:
            _train(Path(folder), n, size, every, epochs, death, steps)
    order = GlobalBatches(n, size)
    expected = [
        (epoch + 1, order.share(epoch, batch, 0, 1))
        for epoch in range(sum(epochs))
        for batch in range(order.num_batches)
    ]
    assert [steps[step] for step in sorted(steps)] == expected
    assert sorted(steps) == list(range(1, len(expected) + 1))


def _train(  # noqa: PLR0917 - what hypothesis draws
    folder: Path,
    n: int,
    size: int,
    every: int,
    epochs: tuple[int, int],
    death: int | None,
    steps: dict[int, tuple[int, list[int]]],
) -> None:
    """Run one attempt; it dies in the body of its step number `death`.

    A step that is made again replaces the one before.
    """
    policy = CheckpointParams(every_steps=every, every_s=None)
    num_made = 0
    try:
        with RankContext.local(storage=folder, checkpoint=policy) as ctx:
            ctx.track(model=torch.nn.Linear(1, 1))
            loader = ctx.loader(TensorDataset(torch.arange(n)), global_batch_size=size)
            for num_epochs in epochs:
                for (samples,) in ctx.steps(loader, epochs=num_epochs):
                    num_made += 1
                    steps[ctx.step] = (ctx.epoch, samples.tolist())
                    if num_made == death:
                        raise DiedError  # noqa: TRY301 - a failure of the body
    except DiedError:
        pass
