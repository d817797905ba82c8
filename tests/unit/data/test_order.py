"""An order of the user's own: which samples an epoch has, on any ranks, resumed, in the ledger."""

import logging
import re
from collections.abc import Callable
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
from prefect_torch_ddp.data.sampler import GlobalBatches, OwnOrder
from prefect_torch_ddp.errors import InvalidParamsError
from tests.unit.data.test_loader import Noise, Numbers, loader_of, walk
from tests.unit.data.test_shards import Noisy

EVERY_STEP = CheckpointParams(every_steps=1, every_s=None)


@settings(max_examples=50, deadline=None)
@given(
    num=st.integers(1, 20),
    length=st.integers(1, 40),
    size=st.integers(1, 12),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    data=st.data(),
)
def test_an_order_is_kept_at_any_world_size_and_from_any_batch(
    *, num: int, length: int, size: int, worlds: tuple[int, int], data: Any
) -> None:
    """Samples that come twice, or not at all, in global batches in that order."""

    def order(epoch: int) -> list[int]:
        return [(7 * place + epoch) % num for place in range(length)]

    whole = walk(Numbers(num), size, worlds[0], order=order, epoch=3)
    assert [number for batch in whole for number in batch] == order(3)
    assert all(len(batch) == size for batch in whole[: length // size])
    start = data.draw(st.integers(0, len(whole)))
    assert walk(Numbers(num), size, worlds[1], start=start, order=order, epoch=3) == whole[start:]


@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, torch.tensor, lambda order: np.array(order, np.uint8)],
    ids=["list", "tuple", "array", "tensor", "bytes"],
)
def test_an_order_is_any_sequence_of_whole_numbers(make: Callable[[Any], Any]) -> None:
    """And is copied: what becomes of the caller's changes nothing."""
    given = make([3, 1, 3, 0])
    loader = loader_of(Numbers(4), 4, order=lambda _epoch: given)
    if isinstance(given, list | np.ndarray | torch.Tensor):
        given[0] = 0
    ((found, _),) = loader.lockstep(0)
    assert found.tolist() == [3, 1, 3, 0]


def test_each_place_of_a_sample_is_augmented_by_itself() -> None:
    """And the same at any world size."""
    options = {"order": lambda _epoch: [1] * 8, "virtual_ranks": 4}
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
    assert len({sample[1] for sample in drawn[0]}) == 8


def test_an_order_that_depends_on_more_than_the_epoch_is_refused() -> None:
    """As soon as it is asked for again: half of an epoch would be of another order."""
    loader = loader_of(Numbers(100), 50, order=lambda _epoch: torch.randperm(100))
    steps = loader.lockstep(0)
    next(steps)
    with pytest.raises(InvalidParamsError, match=r"order\(0\) returned other samples than before"):
        for epoch in (1, 0):
            list(loader.lockstep(epoch))


NUMBERS = Numbers(4)
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (NUMBERS, {"order": lambda _: [0, 4]}, r"order\(0\)\[1\] is 4, and the dataset has .* 0 to 3"),
    (NUMBERS, {"order": lambda _: [-1]}, r"order\(0\)\[0\] is -1"),
    (NUMBERS, {"order": lambda _: []}, r"as whole numbers .*, not a list of float64 \[0\]"),
    (NUMBERS, {"order": lambda _: [0.5]}, r"not a list of float64 \[1\]"),
    (NUMBERS, {"order": lambda _: [True]}, r"not a list of bool \[1\]"),
    (NUMBERS, {"order": lambda _: torch.ones(2, 1).long()}, r"not a Tensor of int64 \[2, 1\]"),
    (NUMBERS, {"order": lambda _: iter([0])}, r"not a list_iterator of object \[\]"),
    (NUMBERS, {"order": [0, 1]}, "order can't be given as a list: it is a function of the epoch"),
    (NUMBERS, {"order": lambda _: [0], "weights": [1] * 4}, "together with weights"),
    (Noisy([2], 2), {"order": lambda _: [0]}, "with a dataset in shards"),
    (NUMBERS, {"order": lambda _: [0], "drop_last": True}, "1 samples don't fill a global batch"),
    (NUMBERS, {"sampler": [0]}, "its order in place of any other sampler"),
]


@pytest.mark.parametrize(("dataset", "options", "says"), REFUSED)
def test_what_cannot_be_an_order_is_refused(dataset: Any, options: Any, says: str) -> None:
    """When the loader is made, with the way out."""
    with pytest.raises(InvalidParamsError, match=says):
        loader_of(dataset, 2, **options)


def test_an_epoch_of_another_length_is_refused() -> None:
    """Before a sample of it is loaded: the steps were counted ahead."""
    loader = loader_of(NUMBERS, 2, order=lambda epoch: [0] * (epoch + 2))
    assert len(list(loader.lockstep(0))) == 1
    with pytest.raises(InvalidParamsError, match=r"order\(1\) has 3 samples and order\(0\) has 2"):
        list(loader.lockstep(1))


def grouped(epoch: int) -> np.ndarray[Any, Any]:
    """Return each of ten samples once, in batches of four of one parity if possible, and
    some of the even ones again."""
    generator = np.random.default_rng(epoch)
    even, odd = (generator.permutation(range(start, 10, 2)) for start in (0, 1))
    return np.concatenate([even, odd, even[:3]])


def train(
    folder: Path, dies_at: int | None = None, order: Any = grouped, **options: Any
) -> list[tuple[int, list[int]]]:
    """Train two epochs in that order; return epoch and samples of each step."""
    seen = []
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP, ledger=True) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        dataset = TensorDataset(torch.arange(10))
        loader = ctx.loader(dataset, global_batch_size=4, order=order, **options)
        for (numbers,) in ctx.steps(loader, epochs=2):
            if ctx.step == dies_at:
                raise InterruptedError
            seen.append((ctx.epoch, numbers.tolist()))
    return seen


@pytest.mark.parametrize("dies_at", [1, 3, 5, 8])
def test_a_training_resumes_in_the_middle_of_its_order(tmp_path: Path, dies_at: int) -> None:
    """With the samples that an undisturbed one has; the ledger has each place once."""
    whole = train(tmp_path / "whole")
    found = [[n for epoch, each in whole if epoch == e for n in each] for e in (1, 2)]
    assert found == [grouped(0).tolist(), grouped(1).tolist()]
    with pytest.raises(InterruptedError):
        train(tmp_path / "killed", dies_at)
    assert train(tmp_path / "killed") == whole[dies_at - 1 :]
    assert train(tmp_path / "killed") == []
    for folder in ("whole", "killed"):
        report = read_ledger(tmp_path / folder, "local")
        says = "13 draws, each once; of 10 different samples"
        assert str(report) == f"epoch 1: {says}\nepoch 2: {says}"
        assert report.epochs[0].num_draws_due == 13


def test_the_ledger_knows_what_is_left_of_an_order(tmp_path: Path) -> None:
    """Of an epoch under way, and of a tail that is left out."""
    with pytest.raises(InterruptedError):
        train(tmp_path / "killed", 6)
    *_, under_way = str(read_ledger(tmp_path / "killed", "local")).splitlines()
    assert re.match(r"epoch 2: \d+ draws of 13, each once; of \d different samples", under_way)
    train(tmp_path, drop_last=True)
    first, _ = read_ledger(tmp_path, "local").epochs
    assert (first.num_draws, first.num_left_out, first.is_clean) == (12, 1, True)


def test_an_epoch_of_an_order_that_has_changed_is_not_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of it would be of other samples; the next one begins."""
    with pytest.raises(InterruptedError):
        train(tmp_path, 3)
    with caplog.at_level(logging.WARNING):
        seen = train(tmp_path, order=lambda epoch: grouped(epoch + 10))
    assert [epoch for epoch, _ in seen] == [2] * 4
    assert "that epoch can't be finished, and the next one begins" in caplog.text
    assert "of 10 samples in an order of your own with the digest" in caplog.text


def test_an_order_is_not_asked_for_beyond_the_last_epoch(tmp_path: Path) -> None:
    """A list of orders, one for each epoch, is enough, also for a training that had ended."""
    orders = [[0, 1, 2, 3], [3, 2, 1, 0]]
    for expected in (2, 0):
        seen = train(tmp_path, order=lambda epoch: orders[epoch])
        assert len(seen) == expected


def test_the_places_of_an_order_are_counted_and_not_the_samples() -> None:
    """An epoch may be longer than the dataset, or shorter."""
    batches = GlobalBatches(4, 2, own_order=OwnOrder(lambda _: [0] * 7, 4))
    assert (batches.num_batches, batches.num_places, batches.num_global(3)) == (4, 7, 1)
