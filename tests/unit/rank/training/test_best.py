"""The best checkpoint by a metric: which validation belongs to which weights."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import CheckpointParams, RankContext, read_metrics
from prefect_torch_ddp.checkpoint.manifest import best, list_manifests
from prefect_torch_ddp.storage.directory import DirectoryStorage


def with_validation(folder: Path, *, saves_with_it: bool, dies_at: int | None = None) -> None:
    """Train five epochs of four steps, validated at each end; a checkpoint every three steps,
    the last and the best one kept."""
    policy = CheckpointParams(
        every_steps=3, every_s=None, keep_last=1, keep_best=1, best_metric="val_accuracy"
    )
    with RankContext.local(storage=folder, checkpoint=policy) as ctx:
        model = nn.Linear(4, 1)
        ctx.track(model=model)
        for (x,) in ctx.steps(
            ctx.loader(TensorDataset(torch.ones(16, 4)), global_batch_size=4), epochs=5
        ):
            if ctx.step == dies_at:
                raise InterruptedError
            model(x).sum().backward()
            ctx.report(loss=1.0)
            if ctx.epoch_ended:
                ctx.report(val_accuracy=(0.1, 0.9, 0.3, 0.2, 0.4)[ctx.epoch - 1])
            ctx.checkpoint(force=saves_with_it and ctx.epoch_ended)


LATE = "val_accuracy was reported in step {}, but the next checkpoint is of step {}"


@pytest.mark.parametrize(("saves_with_it", "expected"), [(False, 9), (True, 8)])
def test_the_best_by_a_metric_of_each_epoch(
    tmp_path: Path, saves_with_it: bool, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first checkpoint after the best validation is kept, or the one of exactly that step."""
    with pytest.raises(InterruptedError):
        with_validation(tmp_path, saves_with_it=saves_with_it, dies_at=14)
    with_validation(tmp_path, saves_with_it=saves_with_it)
    storage = DirectoryStorage(tmp_path)
    assert [manifest.step for manifest in list_manifests(storage, "local")] == [expected, 20]
    top = best(storage, "local", "val_accuracy")
    assert top is not None
    assert (top.step, top.metrics["val_accuracy"]) == (expected, 0.9)
    # The second attempt says it again, of a report of its own.
    texts = re.findall(r"val_accuracy was reported in step \d+, but [^:]*", caplog.text)
    assert texts == ([] if saves_with_it else [LATE.format(4, 6), LATE.format(16, 18)])


@pytest.mark.parametrize("saves_behind", [True, False])
def test_the_best_ones_by_validations_behind_the_loop(
    tmp_path: Path, saves_behind: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints requested with a validation are the best ones, not later ones with its value."""
    policy = CheckpointParams(
        every_steps=3, every_s=None, keep_last=1, keep_best=2, best_metric="val_accuracy"
    )
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        model = nn.Linear(4, 1)
        ctx.track(model=model)
        loader = ctx.loader(TensorDataset(torch.ones(16, 4)), global_batch_size=4)
        for value in (0.8, 0.9, 0.3, 0.2):
            for (x,) in ctx.steps(loader, epochs=1):
                model(x).sum().backward()
                nn.init.constant_(model.bias, ctx.step)
            ctx.report(val_accuracy=value)
            if saves_behind:
                ctx.checkpoint(force=True)
    storage = DirectoryStorage(tmp_path)
    there = list_manifests(storage, "local")
    assert (LATE.format(4, 6) not in caplog.text) == saves_behind
    if saves_behind:
        values = {found.metrics["val_accuracy"]: found for found in there}
        assert sorted(values) == [0.2, 0.8, 0.9]
        validated_at = {0.8: 4, 0.9: 8, 0.2: 16}
        for value, found in values.items():
            bias = torch.load(tmp_path / found.objects[0].key)["bias"]
            assert bias.item() == validated_at[value]
    policy = policy.model_copy(update={"best_metric": "val_acuracy"})
    with RankContext.local(storage=tmp_path / "misspelt", checkpoint=policy) as ctx:
        ctx.track(model=model)
        ctx.report(val_accuracy=0.5)
    assert ctx._assembly.outcome()["best_checkpoint"] is None
    assert "none has a finite value of 'val_acuracy', as reported by rank 0" in caplog.text


@contextmanager
def training(folder: Path, **policy: object) -> Iterator[tuple[RankContext, nn.Module]]:
    """Track a model; `best_metric` is "score"."""
    params = CheckpointParams.model_validate({"every_s": None, "best_metric": "score"} | policy)
    with RankContext.local(storage=folder, checkpoint=params) as ctx:
        model = nn.Linear(4, 1)
        ctx.track(model=model)
        yield ctx, model


def four_steps(ctx: RankContext, model: nn.Module) -> Iterator[int]:
    """Make an epoch; yield the number of each step within it."""
    loader = ctx.loader(TensorDataset(torch.ones(16, 4)), global_batch_size=4)
    for (x,) in ctx.steps(loader, epochs=1):
        model(x).sum().backward()
        yield ctx.step


def scores(folder: Path) -> dict[int, float]:
    """Return the score of each checkpoint that is left, by its number."""
    left = list_manifests(DirectoryStorage(folder), "local")
    return {each.step: each.metrics.get("score", math.nan) for each in left}


def best_step(folder: Path) -> int:
    """Return the number of the best one."""
    found = best(DirectoryStorage(folder), "local", "score")
    assert found is not None
    return found.step


def test_each_report_behind_the_steps_is_one_of_its_own(tmp_path: Path) -> None:
    """A loop of the user's own there, or averaged weights: though no further step is made."""
    with training(tmp_path, keep_last=1, keep_best=1) as (ctx, model):
        assert len([*four_steps(ctx, model)]) == 4
        for score in (0.5, 0.7, 0.95, 0.6, 0.55):
            ctx.report(score=score)
            ctx.checkpoint(force=True)
    assert scores(tmp_path) == {6: 0.95, 8: 0.55}


def test_a_validation_that_runs_again_is_no_new_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On resume, code up to the checkpoint's request runs again; what it reports there, perhaps a
    little differently, is on record and in the checkpoint."""

    def train(*given: float, dies_at: int | None = None) -> None:
        with training(tmp_path, every_steps=3, keep_last=1) as (ctx, model):
            ctx.report(score=given[0] / 10)
            for score in given:
                for step in four_steps(ctx, model):
                    if step == dies_at:
                        raise InterruptedError
                ctx.report(score=score)
                ctx.checkpoint(force=True)

    with pytest.raises(InterruptedError):
        train(0.9, 0.8, dies_at=5)
    train(0.901, 0.5)
    assert (best_step(tmp_path), scores(tmp_path)) == (4, {4: 0.9, 8: 0.5})
    records = read_metrics(tmp_path, "local")
    assert records["step"].tolist() == [0, 4, 8]
    assert records["score"].tolist() == [0.09, 0.9, 0.5]
    assert "was reported in step" not in caplog.text


def test_numbers_of_an_own_loop_are_not_taken_for_steps(tmp_path: Path) -> None:
    """One before `ctx.steps` has had the same numbers."""
    with training(tmp_path, keep_last=99) as (ctx, model):
        for score in (0.1, 0.1, 0.1, 0.1, 0.4, 0.1):
            ctx.report(score=score)
            ctx.checkpoint(force=True)
        for step in four_steps(ctx, model):
            ctx.report(score=step / 5)
            ctx.checkpoint(force=True)
    assert best_step(tmp_path) == 9


def test_the_last_validation_has_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last value gets a checkpoint even if the last step already has one."""
    for _ in range(2):
        with training(tmp_path, every_steps=2) as (ctx, model):
            list(four_steps(ctx, model))
            ctx.report(score=0.9)
        assert (best_step(tmp_path), scores(tmp_path)[5]) == (5, 0.9)
    assert caplog.messages == []


def test_a_validation_in_an_own_loop_is_late_only_if_steps_come_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit of the step that was validated warns of nothing; one of a later step names both."""
    policy = CheckpointParams(every_s=None, best_metric="val_accuracy")
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        for step in range(1, 7):
            ctx.progress(step)
            if step in {2, 5}:
                ctx.report(val_accuracy=step / 10)
            if step in {2, 6}:
                folder = ctx.checkpoint_folder / f"step-{step}"
                folder.mkdir()
                (folder / "state").write_text(str(step))
                ctx.commit(folder, step=step)
    texts = re.findall(r"val_accuracy was reported in step \d+, but [^:]*", caplog.text)
    assert texts == [LATE.format(5, 6)]


def test_a_commit_that_nobody_counts_steps_for_is_never_late(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without `ctx.progress` nobody knows in which step a value was reported."""
    policy = CheckpointParams(every_s=None, best_metric="val_accuracy")
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        for step in (10, 20, 30):
            ctx.report(val_accuracy=step / 100)
            folder = ctx.checkpoint_folder / f"step-{step}"
            folder.mkdir()
            (folder / "state").write_text(str(step))
            ctx.commit(folder, step=step)
    top = best(DirectoryStorage(tmp_path), "local", "val_accuracy")
    assert top is not None
    assert (top.step, top.metrics["val_accuracy"]) == (30, 0.3)
    assert caplog.messages == []


def test_only_a_best_value_is_said_to_be_late(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not one that is worse than a checkpoint's, nor a nan, nor a baseline of untrained weights."""
    top = 0.0
    with training(tmp_path, every_steps=3) as (ctx, model):
        ctx.report(score=0.01)
        for score in (0.5, 0.3, math.nan, 0.7, 0.6):
            for step in four_steps(ctx, model):
                if step % 4 == 0:
                    ctx.report(score=score)
                    ctx.checkpoint(force=score > top)
            top = max(top, score)
    assert not [text for text in caplog.messages if "was reported in step" in text]


def test_a_run_that_starts_from_another_has_no_best_of_its_yet(tmp_path: Path) -> None:
    """The other's value is none of what this run has validated."""
    policy = CheckpointParams(every_steps=2, every_s=None, keep_last=9, best_metric="val_accuracy")

    def train(run_id: str, validated: dict[int, float], resume_from: str | None = None) -> None:
        with RankContext.local(
            storage=tmp_path, checkpoint=policy, run_id=run_id, resume_from=resume_from
        ) as ctx:
            ctx.track(model=nn.Linear(4, 1))
            data = TensorDataset(torch.ones(16, 4))
            epochs = 1 + (resume_from is not None)
            for _ in ctx.steps(ctx.loader(data, global_batch_size=4), epochs=epochs):
                if ctx.step in validated:
                    ctx.report(val_accuracy=validated[ctx.step])
                    ctx.checkpoint(force=True)

    train("first", {4: 0.9})
    train("second", {8: 0.5}, resume_from="first")
    top = best(DirectoryStorage(tmp_path), "second", "val_accuracy")
    assert top is not None
    assert (top.step, top.metrics["val_accuracy"]) == (8, 0.5)


def test_a_best_metric_of_another_name_is_said_while_it_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with what is reported: at the end no best checkpoint could be kept any more."""
    said = "checkpoint.best_metric is 'score', which rank 0 hasn't reported yet; it has reported"
    with training(tmp_path / "other", every_steps=3) as (ctx, model):
        for epoch in range(3):
            for _ in four_steps(ctx, model):
                ctx.report(loss=1.0)
            assert (said in caplog.text) is (epoch > 0)
            ctx.report(val_score=0.5)
    assert caplog.text.count(said) == 1
    assert f"{said} loss, val_score: no checkpoint is kept as the best" in caplog.text
    caplog.clear()
    with training(tmp_path / "late", every_steps=3) as (ctx, model):
        for _ in range(3):
            for _ in four_steps(ctx, model):
                ctx.report(loss=1.0)
            ctx.report(val_loss=0.5)
            ctx.report(score=0.5)
    assert said not in caplog.text


def test_the_best_ones_of_no_metric_are_refused() -> None:
    """They would never be kept."""
    with pytest.raises(ValueError, match=r"keep_best is 3, .*; give best_metric"):
        CheckpointParams(keep_best=3)
