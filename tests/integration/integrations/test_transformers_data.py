"""A Trainer of Transformers that is killed sees the same samples in the same order."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import CheckpointParams, InvalidParamsError, RankContext
from tests.support.ranks import Died, config_for, train_on
from tests.workloads import trainers

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
MORE = pytest.mark.more


def _train(folder: Path, saved: int | None = None, **options: Any) -> list[Any]:
    """Train three epochs of five steps on two ranks; the first attempt dies once this step is
    committed, before the next one."""
    folder.mkdir(exist_ok=True)
    die_at = None
    if saved is not None:
        die_at = partial(trainers.die_once_saved, folder, saved + 1, saved=saved)
    fn = partial(trainers.transformers, **options)
    return train_on(2, config_for(folder, 2), fn, str(folder), die_at)


GROUPED = {"train_sampling_strategy": "group_by_length"}
REBALANCED = {"train_sampling_strategy": "batch_rebalance"}


@pytest.mark.parametrize(
    ("chosen", "saved"),
    [
        pytest.param(GROUPED, 8, id="grouped by length"),
        pytest.param(REBALANCED, 12, id="rebalanced", marks=MORE),
        pytest.param({"sampler": "own"}, 12, id="an own generator", marks=MORE),
        pytest.param({"sampler": "own"}, 10, id="an own one, a new epoch", marks=MORE),
        pytest.param({}, 12, id="the default", marks=MORE),
    ],
)
def test_an_epoch_that_was_interrupted_is_finished_in_its_order(
    tmp_path: Path, chosen: dict[str, Any], saved: int
) -> None:
    """Also after the first epoch, whatever its order was drawn from.

    A rank is killed after a commit and before the next step.
    """
    undisturbed = _train(tmp_path / "straight", **chosen)
    killed = tmp_path / "killed"
    assert Died(-signal.SIGKILL) in _train(killed, saved, **chosen)
    assert _train(killed, **chosen) == undisturbed


def _train_here(folder: Path, die_at: int | None, **options: Any) -> str:
    """Train two epochs of ten steps in this process, with checkpoints at even steps."""

    def die(step: int) -> None:
        if step == die_at:
            raise ChildProcessError

    policy = CheckpointParams(every_s=None, every_steps=2)
    with RankContext.local(storage=folder, run_id="run", checkpoint=policy) as ctx:
        return trainers.transformers(ctx, str(folder), die, num_train_epochs=2, **options)


@pytest.mark.parametrize(
    "chosen",
    [GROUPED, REBALANCED, *({"sampler": name} for name in trainers.SAMPLERS)],
    ids=["grouped by length", "rebalanced", *trainers.SAMPLERS],
)
def test_an_epoch_is_finished_in_its_order_on_one_rank_too(
    tmp_path: Path, chosen: dict[str, Any]
) -> None:
    """Killed in the second epoch."""
    undisturbed = _train_here(tmp_path / "straight", None, **chosen)
    with pytest.raises(ChildProcessError):
        _train_here(tmp_path / "killed", 15, **chosen)
    assert _train_here(tmp_path / "killed", None, **chosen) == undisturbed


@pytest.mark.parametrize(
    ("changed", "has"),
    [
        ({"num_texts": 36}, "36 samples in 9 steps an epoch, each rank 4 a step"),
        ({"num_texts": 39}, "39 samples in 10 steps an epoch, each rank 4 a step"),
        ({"num_texts": 16}, "16 samples in 4 steps an epoch, each rank 4 a step"),
        ({"per_device_train_batch_size": 8}, "40 samples in 5 steps an epoch, each rank 8 a step"),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, None),
    ],
    ids=["fewer", "as many steps", "fewer steps than are done", "other batches", "accumulated"],
)
def test_a_trainer_resumes_with_as_many_samples_and_steps_only(
    tmp_path: Path, changed: dict[str, Any], has: str | None
) -> None:
    """The error names both numbers; before, some samples were used twice or never."""
    with pytest.raises(ChildProcessError):
        _train_here(tmp_path, 12)
    if has is None:
        assert _train_here(tmp_path, None, **changed).startswith("20 ")
        return
    said = f"on 40 samples in 10 steps an epoch, each rank 4 a step, and here are {has}: "
    with pytest.raises(InvalidParamsError, match=said):
        _train_here(tmp_path, None, **changed)


def test_a_trainer_resumes_with_as_many_samples_a_step_only(tmp_path: Path) -> None:
    """Also if an epoch has as many steps: what was done of the epoch is other samples."""
    with pytest.raises(ChildProcessError):
        _train_here(tmp_path, 5, num_texts=9)
    said = "in 3 steps an epoch, each rank 4 a step, and here are 9 samples .* each rank 3 a step: "
    with pytest.raises(InvalidParamsError, match=said):
        _train_here(tmp_path, None, num_texts=9, per_device_train_batch_size=3)


@pytest.mark.parametrize(
    ("die_at", "collator", "warns"),
    [(15, trainers.masked, True), (11, trainers.masked, False), (15, None, False)],
    ids=["in an epoch", "at an epoch's end", "nothing is drawn"],
)
def test_a_trainer_that_resumes_where_reading_draws_random_numbers_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, die_at: int, collator: Any, warns: bool
) -> None:
    """Transformers doesn't restore them within an epoch; from its end the weights are equal."""
    undisturbed = _train_here(tmp_path / "straight", None, collator=collator)
    with pytest.raises(ChildProcessError):
        _train_here(tmp_path / "killed", die_at, collator=collator)
    assert (_train_here(tmp_path / "killed", None, collator=collator) != undisturbed) is warns
    assert ("collator draws random numbers" in caplog.text) is warns
