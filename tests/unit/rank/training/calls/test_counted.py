"""Calls of `ctx.steps` that count steps: without data, and over a loader."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import CheckpointParams, InvalidParamsError, RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.records import read_records
from tests.support.tracked import Tracked, steps_over

EVERY_STEP = CheckpointParams(every_steps=1, every_s=None)


def test_a_call_with_a_total_yields_the_numbers_of_its_steps() -> None:
    """As ctx.step counts them, on from those before; it has no epochs, and moves none."""
    with RankContext.local() as ctx:
        for step in ctx.steps(total=3):
            assert (step, ctx.epoch, ctx.epoch_ended) == (ctx.step, 0, False)
        assert list(ctx.steps(total=2)) == [4, 5]
        assert list(ctx.steps(total=0)) == []
        assert [ctx.epoch for _ in steps_over(ctx, 2, epochs=2)] == [1, 1, 2, 2]
        for _ in ctx.steps(total=math.inf):
            if ctx.step == 12:
                break
        assert (ctx.step, ctx.epoch) == (12, 2)
        assert [ctx.epoch for _ in steps_over(ctx)] == [3] * 4
    outcome = ctx._assembly.outcome()
    assert (outcome["num_steps"], outcome["num_epochs"]) == (16, 3)


def draw(
    folder: Path, total: int, dies_at: int | None = None, epochs: int | None = None
) -> list[Any]:
    """Draw a number in each step, between two reports; return what this attempt drew.

    With `epochs`, after so many epochs of a loader with two batches.
    """
    drawn = []
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        ctx.report(num_parameters=2)
        if epochs is not None:
            for _ in steps_over(ctx, 2, epochs=epochs):
                if ctx.step == dies_at:
                    raise InterruptedError
        for step in ctx.steps(total=total):
            if step == dies_at:
                raise InterruptedError
            drawn.append((step, torch.rand(()).item()))
            ctx.report(drawn=drawn[-1][1])
    return drawn


@pytest.mark.parametrize("epochs", [None, 2])
def test_a_call_with_a_total_resumes_at_its_step(tmp_path: Path, epochs: int | None) -> None:
    """It draws what an undisturbed one draws, makes as many steps, and no record is lost, also of
    the step resumed from."""
    before = 0 if epochs is None else 4
    whole = draw(tmp_path / "whole", 6, epochs=epochs)
    assert [step for step, _ in whole] == [before + number for number in range(1, 7)]
    for dies_at in range(1, before + 7):
        folder = tmp_path / str(dies_at)
        with pytest.raises(InterruptedError):
            draw(folder, 6, dies_at, epochs)
        assert draw(folder, 6, epochs=epochs) == whole[max(dies_at - 1 - before, 0) :]
        records = read_records(DirectoryStorage(folder), "local")
        found = [(each.step, each.metrics["drawn"]) for each in records if "drawn" in each.metrics]
        assert found == whole


def test_a_larger_total_continues_a_finished_call(tmp_path: Path) -> None:
    """A smaller one adds nothing."""
    whole = draw(tmp_path / "whole", 7)
    assert draw(tmp_path / "first", 4) == whole[:4]
    assert draw(tmp_path / "first", 2) == []
    assert draw(tmp_path / "first", 7) == whole[4:]


def numbers_of(
    folder: Path, total: int, dies_at: int | None = None, **options: Any
) -> list[tuple[int, list[int]]]:
    """Train so many steps over a loader of three batches; return epoch and samples of each."""
    seen = []
    with RankContext.local(storage=folder, checkpoint=EVERY_STEP, ledger=True) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        loader = ctx.loader(TensorDataset(torch.arange(10)), global_batch_size=4, **options)
        for (numbers,) in ctx.steps(loader, total=total):
            if ctx.step == dies_at:
                raise InterruptedError
            seen.append((ctx.epoch, numbers.tolist()))
    return seen


@pytest.mark.parametrize("dies_at", [1, 3, 4, 7])
def test_a_loader_is_gone_through_for_a_number_of_steps(tmp_path: Path, dies_at: int) -> None:
    """Over its epochs, ending within one, and resumed at its batch."""
    whole = numbers_of(tmp_path / "whole", 7)
    assert [epoch for epoch, _ in whole] == [1, 1, 1, 2, 2, 2, 3]
    assert sorted(number for _, each in whole[3:6] for number in each) == list(range(10))
    with pytest.raises(InterruptedError):
        numbers_of(tmp_path, 7, dies_at)
    assert numbers_of(tmp_path, 7) == whole[dies_at - 1 :]
    assert numbers_of(tmp_path, 9) == numbers_of(tmp_path / "longer", 9)[7:]


class Counting(TensorDataset):
    """Counts what is read of it."""

    num_read = 0

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        return super().__getitem__(index)


def test_of_a_loader_no_batch_is_read_beyond_the_total() -> None:
    """It might draw from a generator, which a longer training would then miss."""
    dataset = Counting(torch.arange(10))
    with RankContext.local() as ctx:
        loader = ctx.loader(dataset, global_batch_size=2, collate_fn=list)
        assert len(list(ctx.steps(loader, total=2))) == 2
    assert dataset.num_read == 4


def test_no_epoch_ends_where_steps_are_counted(tmp_path: Path) -> None:
    """A checkpoint by epochs comes after an epoch, and not with each counted step that follows."""
    policy = CheckpointParams(every_epochs=1, every_s=None, keep_last=20)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        list(steps_over(ctx, 3))
        list(ctx.steps(total=3))
    assert [each.step for each in list_manifests(DirectoryStorage(tmp_path), "local")] == [3, 6]


@pytest.mark.parametrize("counted_first", [True, False])
def test_a_call_that_has_become_another_one_begins_from_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, counted_first: bool
) -> None:
    """A warning says that the code gained or lost a loader."""

    def steps(ctx: RankContext, *, counted: bool) -> Any:
        return ctx.steps(total=4) if counted else steps_over(ctx, 4)

    with RankContext.local(storage=tmp_path, checkpoint=EVERY_STEP) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        with pytest.raises(InterruptedError):
            for _ in steps(ctx, counted=counted_first):
                if ctx.step == 3:
                    raise InterruptedError
    with RankContext.local(storage=tmp_path, checkpoint=EVERY_STEP) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        with caplog.at_level(logging.WARNING):
            assert len(list(steps(ctx, counted=not counted_first))) == 4
    assert "it starts from the beginning" in caplog.text


def all_wrong(ctx: RankContext) -> Any:
    """Give both lengths."""
    return ctx.steps(
        ctx.loader(TensorDataset(torch.ones(2)), global_batch_size=1), epochs=1, total=1
    )


REFUSED: list[tuple[str, dict[str, Any], Callable[[RankContext], Any]]] = [
    ("give one of the two, not none", {}, lambda ctx: ctx.steps()),
    ("give one of the two, not both", {}, all_wrong),
    (r"takes a loader from ctx\.loader.*not a NoneType", {}, lambda ctx: ctx.steps(epochs=1)),
    (r"total is 1\.5; give a whole number, at least 0", {}, lambda ctx: ctx.steps(total=1.5)),
    ("ledger=True records", {"ledger": True}, lambda ctx: ctx.steps(total=1)),
    (
        "determinism='elastic' cuts the global batches of ctx.loader",
        {"determinism": "elastic", "virtual_ranks": 2},
        lambda ctx: ctx.steps(total=1),
    ),
]


@pytest.mark.parametrize(("says", "options", "use"), REFUSED)
def test_what_cannot_be_counted_is_refused_by_name(
    says: str, options: dict[str, Any], use: Callable[[RankContext], Any]
) -> None:
    """At the call, before a step."""
    with RankContext.local(**options) as ctx, pytest.raises(InvalidParamsError, match=says):
        use(ctx)


def test_a_counted_loop_that_was_left_is_continued_by_the_next_call(tmp_path: Path) -> None:
    """After a break the steps number on, and a resume passes over the call that was left."""

    def train() -> list[int]:
        made = []
        with RankContext.local(storage=tmp_path, checkpoint=EVERY_STEP) as ctx:
            count = Tracked()
            ctx.track(count=count)
            for step in ctx.steps(total=5):
                made.append(step)
                if step == 2:
                    break
            ctx.checkpoint(force=True)
            for step in ctx.steps(total=2):
                made.append(step)
                if step == 4 and not count.value:
                    count.value = 1
                    ctx.checkpoint(force=True)
        return made

    assert train() == [1, 2, 3, 4]
    assert train() == []


@pytest.mark.parametrize(("size", "says"), [(8, 0), (9, 1)], ids=["as large", "larger"])
def test_a_batch_larger_than_the_dataset_is_warned_of(
    caplog: pytest.LogCaptureFixture, size: int, says: int
) -> None:
    """Once, though each epoch may be a call of its own: it is then a single step."""
    with RankContext.local() as ctx, caplog.at_level(logging.WARNING):
        loader = ctx.loader(TensorDataset(torch.zeros(8, 1)), global_batch_size=size)
        for _ in range(2):
            assert len(list(ctx.steps(loader, epochs=1))) == 1
    lines = [line for line in caplog.messages if "global_batch_size is" in line]
    assert len(lines) == says
    assert all(
        "is 9 and the dataset has 8 samples: each epoch is a single" in line for line in lines
    )


@pytest.mark.parametrize("kind", ["counted", "over theirs", "over ours", "on no epoch", "later"])
def test_an_interval_of_epochs_that_a_call_does_not_have_is_warned_of(
    caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Once for a training whose first call has none: no checkpoint would come by it."""
    policy = CheckpointParams(every_epochs=None if kind == "on no epoch" else 1)
    with RankContext.local(checkpoint=policy) as ctx, caplog.at_level(logging.WARNING):
        if kind in {"over ours", "later"}:
            assert len(list(steps_over(ctx))) == 4
        for _ in range(2):
            if kind != "over ours":
                assert len(list(ctx.steps([1, 2] if kind == "over theirs" else None, total=3))) == 3
    lines = [line for line in caplog.messages if "checkpoint.every_epochs" in line]
    assert len(lines) == (kind in {"counted", "over theirs"})
    assert all("a loader from ctx.loader has no epochs" in line for line in lines)
