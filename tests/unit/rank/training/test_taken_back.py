"""What a resumed training takes back of what the attempts before it put on record."""

from pathlib import Path

import pytest
from torch import nn

from prefect_torch_ddp import CheckpointParams, RankContext, read_goodput
from prefect_torch_ddp.rank.training.reporting import phase_times
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.records import read_records

EVERY_2 = CheckpointParams(every_s=None, every_steps=2)


def on_record(folder: Path) -> list[tuple[int, int, dict[str, float]]]:
    """Return step, attempt and metrics of the records that count."""
    found = read_records(DirectoryStorage(folder), "local")
    return [(each.step, each.attempt, each.metrics) for each in found]


def count_steps(folder: Path) -> None:
    """Take ten steps, of which one is worth a record; the first attempt is killed in the sixth."""
    with RankContext.local(storage=folder, checkpoint=EVERY_2) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        for _ in ctx.steps(total=10):
            if ctx.attempt == 1 and ctx.step == 6:
                raise InterruptedError
            if ctx.step == (5 if ctx.attempt == 1 else 9):
                ctx.report(skipped=ctx.attempt)


def test_steps_without_a_record_are_taken_back_too(tmp_path: Path) -> None:
    """A resumed attempt that has nothing to record at first supersedes what it repeats."""
    with pytest.raises(InterruptedError):
        count_steps(tmp_path)
    assert on_record(tmp_path) == [(5, 1, {"skipped": 1.0})]
    count_steps(tmp_path)
    assert on_record(tmp_path) == [(9, 2, {"skipped": 2.0})]


def validate_between(folder: Path) -> None:
    """Record nothing in the steps, but between two calls; the first attempt is killed after it."""
    with RankContext.local(storage=folder, checkpoint=EVERY_2) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        for _ in ctx.steps(total=2):
            pass
        ctx.report(**{"val_loss" if ctx.attempt == 1 else "restarts": 1.0})
        for _ in ctx.steps(total=2):
            if ctx.attempt == 1:
                raise InterruptedError


def test_what_is_reported_at_the_restored_step_takes_nothing_back(tmp_path: Path) -> None:
    """Though no step has a metric: the steps are no loop of the user's own."""
    with pytest.raises(InterruptedError):
        validate_between(tmp_path)
    validate_between(tmp_path)
    assert on_record(tmp_path) == [(2, 1, {"val_loss": 1.0}), (2, 2, {"restarts": 1.0})]


def test_a_report_before_the_place_is_known_makes_no_work_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timing record has no step: the steps of the attempt before are useful ones."""
    monkeypatch.setattr(phase_times, "FIRST_INTERVAL_S", 0.0)
    for attempt in (1, 2):
        with (
            pytest.raises(InterruptedError),
            RankContext.local(storage=tmp_path, checkpoint=EVERY_2) as ctx,
        ):
            ctx.report(num_files=7)
            if attempt == 2:
                raise InterruptedError
            ctx.track(model=nn.Linear(1, 1))
            for _ in ctx.steps(total=10):
                if ctx.step == 5:
                    raise InterruptedError
    assert read_goodput(tmp_path, "local").steps_s > 0
