"""What a resumed training takes back of what the attempts before it put on record."""

from pathlib import Path

import pytest
from torch import nn

from prefect_torch_ddp import CheckpointParams, RankContext, read_goodput
from prefect_torch_ddp.rank.training.reporting import phase_times
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.records import read_records
from tests.support.tracked import Tracked

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


def own_loop(folder: Path) -> None:
    """Report before the checkpoint is looked for; the first attempt is killed in the fifth step."""
    with RankContext.local(storage=folder, checkpoint=CheckpointParams(every_s=None)) as ctx:
        ctx.report(num_files=7)
        done = Tracked()
        ctx.track(done=done)
        for step in range(done.value + 1, 7):
            if ctx.attempt == 1 and step == 5:
                raise InterruptedError
            ctx.report(reward=step)
            done.value = step
            ctx.checkpoint(force=step % 2 == 0)


def test_a_report_before_track_takes_nothing_back_in_an_own_loop(tmp_path: Path) -> None:
    """It would be of step 0, so that all of the attempt before were superseded."""
    with pytest.raises(InterruptedError):
        own_loop(tmp_path)
    first = on_record(tmp_path)
    assert {attempt for _, attempt, _ in first} == {1}
    own_loop(tmp_path)
    both = on_record(tmp_path)
    rewards = [(attempt, row["reward"]) for _, attempt, row in both if "reward" in row]
    assert rewards == [(1, 1.0), (1, 2.0), (1, 3.0), (1, 4.0), (2, 5.0), (2, 6.0)]
    assert [attempt for _, attempt, row in both if "num_files" in row] == [1]
    assert both[: len(first)] == first, "a tracker would begin from the start"


def in_steps(folder: Path, *, is_killed_early: bool = False) -> None:
    """Report before the checkpoint is looked for; the first attempt is killed in step 4."""
    with RankContext.local(storage=folder, checkpoint=EVERY_2) as ctx:
        ctx.report(num_files=7)
        if is_killed_early:
            raise InterruptedError
        ctx.track(model=nn.Linear(1, 1))
        for _ in ctx.steps(total=4):
            if ctx.attempt == 1 and ctx.step == 4:
                raise InterruptedError
            ctx.report(loss=ctx.step)


def test_an_attempt_that_ends_before_track_takes_nothing_back(tmp_path: Path) -> None:
    """Though it has reported; the next one takes back what it repeats."""
    with pytest.raises(InterruptedError):
        in_steps(tmp_path)
    first = on_record(tmp_path)
    assert first == [(0, 1, {"num_files": 7.0}), *((n, 1, {"loss": n}) for n in (1, 2, 3))]
    with pytest.raises(InterruptedError):
        in_steps(tmp_path, is_killed_early=True)
    assert on_record(tmp_path) == first
    in_steps(tmp_path)
    assert on_record(tmp_path) == [*first[:3], *((n, 3, {"loss": n}) for n in (3, 4))]


def test_a_loop_without_a_checkpoint_begins_again_with_its_first_report(tmp_path: Path) -> None:
    """It tracks nothing, so that its place is never known: each attempt supersedes the other."""
    for attempt in (1, 2):
        with RankContext.local(storage=tmp_path) as ctx:
            ctx.report(reward=attempt)
    assert on_record(tmp_path) == [(0, 2, {"reward": 2.0})]


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
