"""When a checkpoint is due, and how often time makes one due: tables of cases."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from prefect_torch_ddp import CheckpointParams, RankContext
from prefect_torch_ddp.checkpoint.gather import SaveCost
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.rank.training.loop_progress import LoopProgress, Position
from prefect_torch_ddp.rank.training.numbers import CheckpointNumbers
from prefect_torch_ddp.rank.training.saves import Pace, Reason, SaveClock, due, next_interval_s
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.tracked import steps_over

STEPS, EPOCHS, TIME = Reason.STEPS, Reason.EPOCHS, Reason.TIME


@dataclass(frozen=True)
class Case:
    """A moment of a training, and what is due then."""

    policy: dict[str, Any]
    step: int = 6
    epoch: int = 1
    """Epochs that are complete."""
    batch: int = 2
    saved: int | None = None
    asked: Reason | None = None
    age_s: float | None = 3.0
    """Of the last checkpoint, where this rank's clock decides."""
    every_s: float = 5.0
    is_due: Reason | None = field(default=None, kw_only=True)


CASES = {
    "nothing is set, nothing is asked": Case({}),
    "asked for in the step": Case({}, asked=Reason.REQUEST, is_due=Reason.REQUEST),
    "all ranks stop": Case({}, asked=Reason.STOP, is_due=Reason.STOP),
    "agreed on by time, on a rank without a clock": Case({}, asked=TIME, age_s=None, is_due=TIME),
    "asked for, and this step is saved": Case({}, saved=6, asked=Reason.REQUEST),
    "a multiple of every_steps": Case({"every_steps": 3}, is_due=STEPS),
    "no multiple of every_steps": Case({"every_steps": 4}),
    "before the first step": Case({"every_steps": 1, "every_epochs": 1}, 0, 0, 0),
    "a multiple of every_steps that is saved": Case({"every_steps": 3}, saved=6),
    "in mid-epoch": Case({"every_epochs": 1}),
    "at an epoch's end": Case({"every_epochs": 1}, batch=0, is_due=EPOCHS),
    "at every second epoch's end, the first": Case({"every_epochs": 2}, batch=0),
    "at every second epoch's end, the second": Case(
        {"every_epochs": 2}, epoch=2, batch=0, is_due=EPOCHS
    ),
    "an epoch's end that is saved": Case({"every_epochs": 1}, batch=0, saved=6),
    "by time, too early": Case({}, age_s=4.9),
    "by time": Case({}, age_s=5.0, is_due=TIME),
    "by time, on a rank whose clock doesn't decide": Case({}, age_s=None),
    "by time, and by steps, which needs no agreement": Case(
        {"every_steps": 3}, age_s=9.0, is_due=STEPS
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_checkpoint_is_due_as_the_table_says(case: Case) -> None:
    """One function decides for all."""
    position = Position(loop_epoch=case.epoch, epoch=case.epoch, batch=case.batch)
    numbers = CheckpointNumbers(LoopProgress(case.step, position=position), case.saved)
    pace = None if case.age_s is None else Pace(100.0, case.every_s)
    now_s = 100.0 + (case.age_s or 0)
    policy = CheckpointParams(**{"every_s": None, **case.policy})
    assert due(policy, numbers.moment, now_s, case.asked, pace) is case.is_due


def cost(spent_s: float, written_s: float = 0.05) -> SaveCost:
    """Describe a save by what it cost in all and how long it took."""
    return SaveCost(spent_s / 4, spent_s * 3 / 4, written_s)


INTERVALS = {
    "no save yet: the least": (2.0, [], 2.0),
    "a save that costs next to nothing: the least": (2.0, [cost(0.001)], 2.0),
    "1 % of the time": (4.0, [cost(0.05)], 5.0),
    "a first save that costs much: twice the interval": (2.0, [cost(3.0)], 4.0),
    "which later ones don't confirm: what they cost": (
        4.0,
        [cost(3.0), cost(0.03), cost(0.03)],
        3.0,
    ),
    "one of three that costs much: what the others cost": (
        3.0,
        [cost(0.03), cost(0.03), cost(3.0)],
        3.0,
    ),
    "all cost much: at most a minute": (60.0, [cost(3.0)] * 3, 60.0),
    "a slow storage: busy at most half of the time": (2.0, [cost(0.01, 20.0)], 40.0),
    "a storage that takes minutes: at most a minute": (60.0, [cost(0.01, 200.0)], 60.0),
    "a save that failed: twice the interval": (8.0, [cost(0.01), None], 16.0),
    "saves that fail: at most a minute": (60.0, [None, None, None], 60.0),
    "a save after some that failed: what it cost": (60.0, [None, None, cost(0.05)], 5.0),
}


@pytest.mark.parametrize(("last_s", "costs", "expected_s"), INTERVALS.values(), ids=INTERVALS)
def test_the_interval_follows_from_what_saves_cost(
    last_s: float, costs: list[SaveCost | None], expected_s: float
) -> None:
    """By default, and at most doubles from one save to the next."""
    assert next_interval_s(last_s, costs) == pytest.approx(expected_s)


def test_the_interval_is_said_once_when_it_has_settled(caplog: pytest.LogCaptureFixture) -> None:
    """In the log, with what a checkpoint costs; a number stays a number and says nothing."""
    caplog.set_level(logging.INFO)
    auto, fixed = SaveClock("auto", 0.0), SaveClock(7.0, 0.0)
    for spent_s in (3.0, 0.05, 0.05, 0.05, 0.05):
        auto.note(cost(spent_s))
        fixed.note(cost(spent_s))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("a checkpoint is written every 5 s: it costs 50 ms, 1 % of the time;")
    assert (auto.pace(), fixed.pace()) == (Pace(0.0, 5.0), Pace(0.0, 7.0))


def test_a_share_above_the_usual_one_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """The longest interval is kept to, even if a checkpoint then costs more than 1 %."""
    caplog.set_level(logging.INFO)
    auto = SaveClock("auto", 0.0, interval_s=60.0)
    for _ in range(3):
        auto.note(cost(0.9))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("a checkpoint is written every 60 s: it costs 900 ms, 1.5 % of the time")


def test_by_default_no_save_waits_for_another_one() -> None:
    """A number of seconds is kept to, and its step waits for the storage."""
    assert SaveClock("auto", 0.0).pace(is_writing=True) is None
    assert SaveClock(7.0, 0.0).pace(is_writing=True) == Pace(0.0, 7.0)
    assert SaveClock(None, 0.0).pace() is None


def test_each_epoch_ends_with_a_checkpoint_if_that_is_asked(tmp_path: Path) -> None:
    """Over several calls of `steps` too, and an epoch that was left counts as one."""
    policy = CheckpointParams(every_s=None, every_epochs=1, keep_last=9)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        for _ in steps_over(ctx, 3, epochs=2):
            pass
        for _ in steps_over(ctx, 3, epochs=2):
            if ctx.step == 8:
                break
        for _ in steps_over(ctx, 3, epochs=1):
            pass
    steps = [manifest.step for manifest in list_manifests(DirectoryStorage(tmp_path), "local")]
    assert steps == [3, 6, 11]


@pytest.mark.parametrize("every_s", ["auto", 1e-9], ids=["by default", "by a number"])
def test_a_checkpoint_stays_long_enough_to_be_read_while_newer_ones_come(
    tmp_path: Path, every_s: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default young checkpoints stay while the training runs; later keep_last decides."""
    policy, storage = CheckpointParams(every_s=every_s), DirectoryStorage(tmp_path)
    with RankContext.local(storage=storage, checkpoint=policy) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        for _ in steps_over(ctx, 6):
            ctx.checkpoint(force=True)
            ctx._assembly.saver._checkpointer.wait()
        ctx._assembly.saver._checkpointer.wait()
        kept = [manifest.step for manifest in list_manifests(storage, "local")]
        assert kept == ([1, 2, 3, 4, 5, 6] if every_s == "auto" else [5, 6])
    assert [manifest.step for manifest in list_manifests(storage, "local")] == [5, 6]


def in_own_loop(folder: Path, how: str, **policy: Any) -> list[int]:
    """Train six steps without `ctx.steps`; return the steps at which a checkpoint was written."""
    storage, found = DirectoryStorage(folder), []
    chosen = CheckpointParams(**{"keep_last": 9, "every_s": 1e-9, **policy})
    with RankContext.local(storage=storage, checkpoint=chosen) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        for step in range(1, 7):
            before = ctx._assembly.saver._checkpointer
            ctx.checkpoint(**({} if how == "bare" else {"force": ctx.due(step).save}))
            before.wait()
            if len(list_manifests(storage, "local")) > len(found):
                found.append(step)
    return found


def test_a_bare_request_in_an_own_loop_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: it writes none by time, and says how those that are due are written."""
    assert in_own_loop(tmp_path / "bare", "bare") == []
    said = "ctx.checkpoint() without force=True writes nothing in a loop without ctx.steps"
    assert caplog.text.count(said) == 1
    caplog.clear()
    assert in_own_loop(tmp_path / "due", "asks due") == [1, 2, 3, 4, 5, 6]
    assert in_own_loop(tmp_path / "3", "asks due", every_s=None, every_steps=3) == [3, 6]
    assert in_own_loop(tmp_path / "none", "bare", every_s=None) == []
    assert said not in caplog.text
