"""Loaders that aren't ours in `ctx.steps`: their passes, their own state, and those without."""

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from prefect_torch_ddp import CheckpointParams, InvalidParamsError, RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.workloads.counted import Shuffled

EVERY_STEP = CheckpointParams(every_steps=1, every_s=None)


def go_over(folder: Path, dies_at: int | None = None, **calls: int) -> list[tuple[Any, float]]:
    """Go over a loader that knows its place, in calls of so many steps, with draws in each step;
    return what this attempt got."""
    seen = []
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        theirs = Shuffled(6, batch_size=2)
        for total in (calls or {"only": 8}).values():
            for rows in ctx.steps(theirs, total=total):
                if ctx.step == dies_at:
                    raise InterruptedError
                seen.append((rows, torch.rand(()).item()))
            torch.rand(7)  # as a validation may
    return seen


def test_a_loader_of_others_is_gone_over_again_and_again(tmp_path: Path) -> None:
    """Each pass in its own order, until the steps are made; there are no epochs of ours."""
    seen = [rows for rows, _ in go_over(tmp_path)]
    passes = [seen[:3], seen[3:6], seen[6:]]
    assert [sorted(row for rows in each for row in rows) for each in passes[:2]] == [
        [*range(6)]
    ] * 2
    assert passes[0] != passes[1]
    assert len(passes[2]) == 2


@pytest.mark.parametrize("calls", [{}, {"first": 2, "second": 4}], ids=["one call", "two calls"])
def test_a_loader_with_a_state_resumes_exactly(tmp_path: Path, calls: dict[str, int]) -> None:
    """A loader resumes at each step, at a pass's end, after a call and in a later call."""
    whole = go_over(tmp_path / "whole", **calls)
    for dies_at in (1, 3, 4, 6):
        with pytest.raises(InterruptedError):
            go_over(tmp_path / str(dies_at), dies_at, **calls)
        assert go_over(tmp_path / str(dies_at), **calls) == whole[dies_at - 1 :], dies_at


def test_a_finished_call_makes_no_checkpoint_again(tmp_path: Path) -> None:
    """The place that it was left at is the place that was saved."""
    go_over(tmp_path)
    go_over(tmp_path)
    (*_, newest) = list_manifests(DirectoryStorage(tmp_path), "local")
    assert newest.step == 8
    assert "steps-0.rank-00000" in {each.name for each in newest.objects}


def test_two_loaders_keep_their_own_places(tmp_path: Path) -> None:
    """The second one, which comes after a call was over, isn't given the first one's."""

    def train(dies_at: int | None = None) -> list[Any]:
        seen = []
        with RankContext.local(storage=tmp_path, checkpoint=EVERY_STEP) as ctx:
            ctx.track(model=nn.Linear(1, 1))
            for num_rows in (4, 8):
                for rows in ctx.steps(Shuffled(num_rows, 2), total=3):
                    if ctx.step == dies_at:
                        raise InterruptedError
                    seen.append(rows)
                ctx.checkpoint(force=True)
        return seen

    with pytest.raises(InterruptedError):
        train(dies_at=5)
    resumed = train()
    assert len(resumed) == 2
    assert all(0 <= row < 8 for rows in resumed for row in rows)
    assert train() == []


def epochs_of(folder: Path, dies_at: int | None = None) -> list[list[int]]:
    """Go over torch's DataLoader with a DistributedSampler; return what each step had."""
    seen = []
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        dataset = TensorDataset(torch.arange(6))
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0)
        for (rows,) in ctx.steps(DataLoader(dataset, batch_size=2, sampler=sampler), total=6):
            if ctx.step == dies_at:
                raise InterruptedError
            seen.append(rows.tolist())
    return seen


def test_a_loader_without_a_state_begins_the_next_pass(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the order of that pass, by set_epoch; the log says at the start, and at the resume, that
    this isn't exact."""
    with caplog.at_level(logging.WARNING):
        whole = epochs_of(tmp_path / "whole")
        assert "iterates over a DataLoader without state_dict and load_state_dict" in caplog.text
        assert "start from the beginning\n" not in caplog.text
        assert whole[:3] != whole[3:]
        with pytest.raises(InterruptedError):
            epochs_of(tmp_path, dies_at=3)
        resumed = epochs_of(tmp_path)
    assert (
        "the DataLoader that ctx.steps iterates over has no state in the checkpoint" in caplog.text
    )
    assert resumed[:3] == whole[3:]
    assert len(resumed) == 4


def test_who_tracks_nothing_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    """There is no resume that could be inexact."""
    with RankContext.local() as ctx:
        assert list(ctx.steps([1, 2], total=5)) == [1, 2, 1, 2, 1]
    assert "state_dict" not in caplog.text


class Rollout(list[int]):
    """A list that can be watched."""


def test_what_has_no_place_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Programs that collect their data anew have a list for each call, which is large."""
    with RankContext.local(storage=tmp_path) as ctx, caplog.at_level(logging.WARNING):
        ctx.track(model=nn.Linear(1, 1))
        for _ in range(3):
            rollout = Rollout([1, 2])
            assert list(ctx.steps(rollout, total=2)) == [1, 2]
            watched = weakref.ref(rollout)
            del rollout
            gc.collect()
            assert watched() is None
    assert caplog.text.count("iterates over a Rollout without state_dict") == 1


def endless() -> Iterator[float]:
    """Yield draws."""
    while True:
        yield torch.rand(()).item()


def test_a_generator_is_gone_through_once(tmp_path: Path) -> None:
    """Without an end it is as long as it takes; one that ends too early is named."""
    with RankContext.local(storage=tmp_path) as ctx:
        assert len(list(ctx.steps(endless(), total=5))) == 5
        says = r"the generator .* has no batch in a new pass: it is empty, or an iterator"
        with pytest.raises(InvalidParamsError, match=says):
            list(ctx.steps((number for number in (1, 2)), total=3))
        with pytest.raises(InvalidParamsError, match=r"the list .* has no batch"):
            list(ctx.steps([], total=3))


@pytest.mark.parametrize(
    ("says", "arguments"),
    [
        (r"not a DataLoader; any other iterable goes with total=", {"epochs": 1}),
        ("ledger=True records", {"total": 1}),
    ],
)
def test_what_a_loader_of_others_cannot_have_is_refused(says: str, arguments: Any) -> None:
    """Epochs, which it doesn't count, and a ledger, whose samples it doesn't name."""
    with RankContext.local(ledger=True) as ctx, pytest.raises(InvalidParamsError, match=says):
        ctx.steps(DataLoader([1]), **arguments)
