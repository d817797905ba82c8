"""Nothing lost and nothing twice over whole histories: epochs, interruptions, steps made again,
other numbers of ranks."""

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.data.sampler import GlobalBatches
from prefect_torch_ddp.params import CheckpointParams


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
    policy = CheckpointParams(every_steps=every, every_s=None)
    steps: dict[int, tuple[int, list[int]]] = {}  # one that is made again replaces the one before

    def train(folder: Path, death: int | None) -> None:
        num_made = 0
        with RankContext.local(storage=folder, checkpoint=policy) as ctx:
            ctx.track(model=torch.nn.Linear(1, 1))
            loader = ctx.loader(TensorDataset(torch.arange(n)), global_batch_size=size)
            for num_epochs in epochs:
                for (samples,) in ctx.steps(loader, epochs=num_epochs):
                    num_made += 1
                    steps[ctx.step] = (ctx.epoch, samples.tolist())
                    if num_made == death:
                        raise DiedError

    with TemporaryDirectory() as folder:
        for death in [*deaths, None]:
            with suppress(DiedError):
                train(Path(folder), death)
    order = GlobalBatches(n, size)
    expected = [
        (epoch + 1, order.share(epoch, batch, 0, 1))
        for epoch in range(sum(epochs))
        for batch in range(order.num_batches)
    ]
    assert steps == dict(enumerate(expected, start=1))
