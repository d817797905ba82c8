"""Samples that are drawn by weights: which, in which order, and what the ledger says of them."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import CheckpointParams, RankContext, read_ledger
from prefect_torch_ddp.data.sampler import GlobalBatches
from prefect_torch_ddp.errors import InvalidParamsError
from tests.unit.data.test_loader import Noise, Numbers, loader_of, walk
from tests.unit.data.test_shards import Noisy
from tests.unit.records.test_ledger import History, LoopLine

WEIGHTS = [0.0, 1.0, 2.0, 5.0]


@settings(max_examples=50, deadline=None)
@given(
    num=st.integers(1, 40),
    size=st.integers(1, 12),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_draws_are_the_same_at_any_world_size_and_from_any_batch(
    *, num: int, size: int, worlds: tuple[int, int], seed: int, data: Any
) -> None:
    """As many as there are samples, in full global batches; a resume continues the same ones."""
    options = {"seed": seed, "weights": [1.0 + i % 3 for i in range(num)], "epoch": 2}
    whole = walk(Numbers(num), size, worlds[0], **options)
    assert sum(map(len, whole)) == num
    assert all(len(batch) == size for batch in whole[: num // size])
    start = data.draw(st.integers(0, len(whole)))
    assert walk(Numbers(num), size, worlds[1], start=start, **options) == whole[start:]


def test_samples_are_drawn_as_often_as_their_weights_say() -> None:
    """Within four standard deviations; a weight of 0 never."""
    num = 40_000
    batches = GlobalBatches(num, num, weights=np.array(WEIGHTS * (num // 4)))
    counts = np.bincount(np.array(batches.share(0, 0, 0, 1)) % 4)
    expected = np.array(WEIGHTS) / sum(WEIGHTS)
    limits = [4 * math.sqrt(num * share * (1 - share)) for share in expected]
    assert all(abs(counts - num * expected) <= limits)


def test_the_order_of_draws_is_pinned() -> None:
    """A checkpoint of today resumes in the same order tomorrow; epochs and seeds differ."""
    batches = [GlobalBatches(8, 8, seed, weights=np.array(WEIGHTS * 2)) for seed in (3, 4)]
    assert [batches[0].share(epoch, 0, 0, 1) for epoch in (0, 1, 0)] == [
        [7, 2, 7, 3, 7, 6, 7, 1],
        [3, 2, 5, 7, 7, 7, 3, 6],
        [7, 2, 7, 3, 7, 6, 7, 1],
    ]
    assert batches[1].share(0, 0, 0, 1) == [7, 2, 7, 3, 2, 2, 5, 3]


def test_the_last_weight_of_none_is_never_drawn() -> None:
    """A sample of weight 0 at the end isn't, however a product is rounded."""
    batches = GlobalBatches(3, 3, weights=np.array([1e-300, 1e-300, 0.0]))
    assert {i for epoch in range(50) for i in batches.share(epoch, 0, 0, 1)} == {0, 1}


def test_each_draw_of_a_sample_is_augmented_by_itself() -> None:
    """And the same at any world size."""
    options = {"weights": [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "virtual_ranks": 4}
    drawn = []
    for world in (1, 2):
        loaders = [loader_of(Noise(8), 8, rank, world, **options) for rank in range(world)]
        shares = [
            share.batch
            for loader in loaders
            for data, _ in loader.lockstep(0)
            for share in data.shares
        ]
        drawn.append(torch.cat(shares).tolist())
    assert drawn[0] == drawn[1]
    assert {sample[0] for sample in drawn[0]} == {1.0}
    assert len({sample[1] for sample in drawn[0]}) == 8


def test_weights_are_copied() -> None:
    """What becomes of the caller's array changes no order."""
    weights = torch.ones(8, dtype=torch.float64)
    loader = loader_of(Numbers(8), 8, weights=weights)
    (before,) = (data.tolist() for data, _ in loader.lockstep(0))
    weights[:] = torch.arange(8)
    list(loader.lockstep(1))
    (after,) = (data.tolist() for data, _ in loader.lockstep(0))
    assert after == before


@pytest.mark.parametrize(
    ("dataset", "options", "says"),
    [
        pytest.param(Numbers(4), {"weights": [1.0]}, r"shape \[1\], and .* 4 samples", id="few"),
        pytest.param(Numbers(2), {"weights": torch.ones(2, 1)}, r"shape \[2, 1\]", id="matrix"),
        pytest.param(Numbers(2), {"weights": [1.0, -1.0]}, "none of them negative", id="negative"),
        pytest.param(Numbers(2), {"weights": [1.0, math.nan]}, "have to be finite", id="nan"),
        pytest.param(Numbers(2), {"weights": [0, 0]}, "not all 0", id="zeros"),
        pytest.param(Numbers(2), {"weights": "ab"}, "have to be numbers", id="text"),
        pytest.param(
            Numbers(2), {"weights": [1, 1], "shuffle": False}, "with shuffle=False", id="in_order"
        ),
        pytest.param(Noisy([2], 2), {"weights": [1, 1]}, "a dataset in shards", id="shards"),
        pytest.param(
            Numbers(2), {"sampler": [0]}, "weights in place of a WeightedRandomS", id="sampler"
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(dataset: Any, options: dict[str, Any], says: str) -> None:
    """When the loader is made, with the way out."""
    with pytest.raises(InvalidParamsError, match=says):
        loader_of(dataset, 2, **options)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(lambda lines: None, "10 draws, each once; of", id="whole"),
        pytest.param(lambda lines: lines.pop(1), "8 draws; of .* 2 missing", id="a_share_lost"),
        pytest.param(
            lambda lines: lines.append(lines[1]), "10 draws; of .*; 2 repeated", id="a_share_twice"
        ),
    ],
)
def test_the_ledger_counts_draws(change: Any, says: str) -> None:
    """Those that are missing or were made again; a sample that is drawn twice is neither."""
    weights = np.arange(10.0)
    history = History(GlobalBatches(10, 4, weights=weights))
    history.attempt(1, 2, 0, 3)
    lines, begun = history.steps(), [each for each in history.lines if isinstance(each, LoopLine)]
    change(lines)
    history.lines = [*begun, *lines]
    (epoch,) = history.check().epochs
    assert re.search(says, str(epoch))
    assert epoch.is_clean == (says.endswith("of"))


def drawn_in(folder: Path, dies_at: int | None = None, *, drops: bool = False) -> list[list[float]]:
    """Train two epochs by weights, with a checkpoint of each step; return what each step had."""
    every_step = CheckpointParams(every_steps=1, every_s=None)
    with RankContext.local(storage=folder, checkpoint=every_step, ledger=True) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        dataset = TensorDataset(torch.arange(10.0)[:, None])
        weights = torch.arange(10) ** 2
        seen = []
        for (x,) in ctx.steps(ctx.loader(dataset, global_batch_size=4, weights=weights), epochs=2):
            if ctx.step == dies_at:
                raise InterruptedError
            seen.append(x.flatten().tolist())
        return seen


def test_a_training_resumes_in_the_middle_of_its_draws(tmp_path: Path) -> None:
    """It makes the draws that an undisturbed one makes, and the ledger has each of them once."""
    whole = drawn_in(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        drawn_in(tmp_path / "killed", dies_at=5)
    assert drawn_in(tmp_path / "killed") == whole[4:]
    for folder in ("whole", "killed"):
        report = read_ledger(tmp_path / folder, "local")
        assert report.is_clean
        first, second = report.epochs
        assert (first.num_draws, first.num_total, first.num_missing) == (10, 10, 0)
        assert first.num_samples == len({each for step in whole[:3] for each in step}) < 10
        assert str(second).startswith("epoch 2: 10 draws, each once; of ")
