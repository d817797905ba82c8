"""`ctx.due` in a loop of the user's own: the same decisions as in `ctx.steps`."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import CheckpointParams, InvalidParamsError, RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage

EPOCH = 3
"""Steps in an epoch."""


def due_steps(storage: Path, num_steps: int, **policy: Any) -> list[int]:
    """Return the steps at which a checkpoint is due, each of which is committed."""
    chosen = CheckpointParams(**{"every_s": None, **policy})
    steps = []
    with RankContext.local(storage=storage, checkpoint=chosen) as ctx:
        folder = ctx.checkpoint_folder / "folder"
        folder.mkdir()
        (folder / "a").write_text("a")
        for step in range(1, num_steps + 1):
            if step == 4:
                ctx.checkpoint(force=True)
            due = ctx.due(step, ends_epoch=None if step % EPOCH else step // EPOCH)
            assert not due.stop
            if due.save:
                ctx.commit(folder, step=step)
                steps.append(step)
    return steps


CASES = {
    "asked for": ({}, [4]),
    "every third step": ({"every_steps": 3}, [3, 4, 6, 9]),
    "each epoch": ({"every_epochs": 1}, [3, 4, 6, 9]),
    "every second epoch": ({"every_epochs": 2}, [4, 6]),
    "by time": ({"every_s": 1e-9}, list(range(1, 10))),
}


@pytest.mark.parametrize(("policy", "expected"), CASES.values(), ids=CASES)
def test_a_checkpoint_is_due_as_in_steps(
    tmp_path: Path, policy: dict[str, Any], expected: list[int]
) -> None:
    """By steps, epochs, time and when the training asks for it."""
    assert due_steps(tmp_path, 9, **policy) == expected


def test_a_step_that_is_committed_is_not_due(tmp_path: Path) -> None:
    """A second commit of it would be refused."""
    policy = CheckpointParams(every_s=None, every_steps=1)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        folder = ctx.checkpoint_folder / "folder"
        folder.mkdir()
        (folder / "a").write_text("a")
        ctx.commit(folder, step=1)
        assert not ctx.due(1).save
        assert ctx.due(2).save


@pytest.mark.parametrize(
    ("every_epochs", "ends_epoch", "is_said"), [(1, None, True), (1, 1, False), (None, None, False)]
)
def test_an_interval_of_epochs_in_a_loop_that_says_no_epochs_is_warned_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    every_epochs: int | None,
    ends_epoch: int | None,
    *,
    is_said: bool,
) -> None:
    """At the loop's end, since an epoch may have many steps; no checkpoint came by it."""
    policy = CheckpointParams(every_epochs=every_epochs)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        _ = ctx.checkpoint_folder
        for step in range(1, 4):
            ctx.due(step, ends_epoch=ends_epoch if step == 3 else None)
    said = "checkpoint.every_epochs=1 made no checkpoint: no call of ctx.due had ends_epoch=..."
    assert caplog.text.count(said) == is_said


def test_the_number_of_a_checkpoint_of_tracked_objects_is_not_taken_for_a_step(
    tmp_path: Path,
) -> None:
    """These count from 0, whatever the step is: number 1 doesn't mean that step 1 is saved."""
    policy = CheckpointParams(every_s=None, every_steps=1)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        ctx.state(value=0)
        for _ in range(2):
            ctx.checkpoint(force=True)
        assert [ctx.due(step).save for step in (1, 2)] == [True, True]
        ctx.checkpoint(force=True)
        ctx.checkpoint(force=True)
        ctx.request_stop("enough")
        assert tuple(ctx.due(3)) == (True, True)


def test_without_a_folder_nothing_is_due(tmp_path: Path) -> None:
    """There is nothing to save, but the loop can be stopped."""
    with RankContext.local(storage=tmp_path, checkpoint=CheckpointParams(every_steps=1)) as ctx:
        assert tuple(ctx.due(1)) == (False, False)
        ctx.request_stop("enough")
        assert tuple(ctx.due(2)) == (False, True)


def test_a_stop_comes_with_a_checkpoint(tmp_path: Path) -> None:
    """Also one that was requested before the first step; after it nothing is saved."""
    policy = CheckpointParams(every_s=None)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        _ = ctx.checkpoint_folder
        ctx.request_stop("enough")
        assert tuple(ctx.due(1)) == (True, True)
        assert tuple(ctx.due(2)) == (False, True)


def test_a_stop_at_a_committed_step_asks_for_no_second_checkpoint(tmp_path: Path) -> None:
    """It would be refused, and the training end by that."""
    with RankContext.local(storage=tmp_path, checkpoint=CheckpointParams(every_s=None)) as ctx:
        folder = ctx.checkpoint_folder / "folder"
        folder.mkdir()
        (folder / "a").write_text("a")
        ctx.commit(folder, step=1)
        ctx.request_stop("enough")
        assert tuple(ctx.due(1)) == (False, True)


def test_a_step_is_asked_for_once(tmp_path: Path) -> None:
    """The same again is refused, and a gap, in which the step may lie that ranks agree on."""
    with RankContext.local(storage=tmp_path) as ctx:
        ctx.due(3)
        with pytest.raises(InvalidParamsError, match="given step 3 after step 3: call it once"):
            ctx.due(3)
        with pytest.raises(InvalidParamsError, match="given step 13 after step 3: call it once"):
            ctx.due(13)


@pytest.mark.parametrize("epoch", [0, -1, "1"], ids=repr)
def test_an_epoch_is_counted_from_1(tmp_path: Path, epoch: Any) -> None:
    """Epoch 0 would always be due, and each later one an epoch too early."""
    policy = CheckpointParams(every_s=None, every_epochs=2)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        _ = ctx.checkpoint_folder
        with pytest.raises(InvalidParamsError, match=r"ends_epoch is .*; give a whole"):
            ctx.due(1, ends_epoch=epoch)
        assert [ctx.due(step, ends_epoch=step).save for step in (1, 2)] == [False, True]


@pytest.mark.parametrize("how", ["from outside", "by itself"])
def test_tracked_objects_are_saved_at_the_step_of_a_stop(tmp_path: Path, how: str) -> None:
    """What `due` asks for then is written; code after the loop comes too early to be saved."""

    def train() -> list[int]:
        made = []
        policy = CheckpointParams(every_s=None, every_steps=3)
        with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
            state = ctx.state(step=0, has_ended=False)
            for step in range(state.step + 1, 9):
                made.append(step)
                state.step = step
                if step == 5 and ctx.attempt == 1 and how == "from outside":
                    os.kill(os.getpid(), signal.SIGTERM)
                if step == 5 and ctx.attempt == 1 and how == "by itself":
                    ctx.request_stop("enough")
                due = ctx.due(step)
                ctx.checkpoint(force=due.save)
                if due.stop:
                    break
            assert not state.has_ended
            state.has_ended = ctx.attempt == 1 and how == "from outside"
            ctx.checkpoint(force=state.has_ended)
        return made

    assert train() == [1, 2, 3, 4, 5]
    assert train() == [6, 7, 8]


@pytest.mark.parametrize("saves_after_it", [True, False])
def test_a_commit_of_the_step_that_was_validated_is_ranked_by_its_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, saves_after_it: bool
) -> None:
    """Its manifest has the loop's epoch; only a commit of later weights is warned of."""
    policy = CheckpointParams(every_s=None, best_metric="val_loss", best_mode="min")
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        folder = ctx.checkpoint_folder / "folder"
        folder.mkdir()
        (folder / "a").write_text("a")
        for step in range(1, 7):
            ctx.progress(step, 6, epoch=(step + 2) // 3)
            if step % 3 == 0:
                ctx.report(val_loss=1 / step)
            if step % 3 == (0 if saves_after_it else 1) and step > 1:
                ctx.commit(folder, step=step)
    found = list_manifests(DirectoryStorage(tmp_path), "local")
    expected = [(3, 1), (6, 2)] if saves_after_it else [(4, 2)]
    assert [(each.step, each.epoch) for each in found] == expected
    late = "val_loss was reported in step 3, but the next checkpoint is of step 4"
    assert (late in caplog.text) is not saves_after_it
    assert ("val_loss was reported" in caplog.text) is not saves_after_it
