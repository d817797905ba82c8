"""Real ranks that count steps are killed, resumed to the same bits, stopped and compared."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import CheckpointError, InvalidParamsError, RankContext
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.ranks import Died, config_for, train_on
from tests.support.records import read_records
from tests.workloads.counted import NUM_STEPS, train_on_draws, train_on_theirs

pytestmark = pytest.mark.timeout(120)


def train(world_size: int, folder: Path, **options: Any) -> list[Any]:
    """Run an attempt of the training there; return what its ranks do."""
    return train_on(world_size, config_for(folder, options=options), train_on_draws)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Return what trains on so many ranks undisturbed, once, and gives the weights' hash."""

    @functools.cache
    def train_once(world_size: int) -> str:
        (found,) = {each["sha256"] for each in train(world_size, tmp_path_factory.mktemp("whole"))}
        return found

    return train_once


@pytest.mark.parametrize(
    ("world_size", "die_at", "die_on"),
    [(2, 4, 1), pytest.param(3, 7, 0, marks=pytest.mark.extended)],
)
def test_a_killed_training_on_draws_ends_with_the_same_weights(
    tmp_path: Path, whole: Callable[[int], str], world_size: int, die_at: int, die_on: int
) -> None:
    """After a kill every bit and value is the undisturbed run's, and each step is recorded once."""
    saved = (die_at - 1) // 2 * 2
    death = {"die_at": die_at, "die_on": die_on, "die_after": saved}
    assert Died(-9) in train(world_size, tmp_path, **death)
    found = train(world_size, tmp_path)
    assert [each["made"] for each in found] == [[*range(saved + 1, NUM_STEPS + 1)]] * world_size
    assert {each["sha256"] for each in found} == {whole(world_size)}
    squares = [step * step for step in range(1, NUM_STEPS + 1)]
    assert [each["state"] for each in found] == [{"last": 9, "squares": squares}] * world_size
    records = [(each.step, each.rank) for each in read_records(DirectoryStorage(tmp_path), "run")]
    assert records == [(s, r) for s in range(1, NUM_STEPS + 1) for r in range(world_size)]


def test_a_killed_training_over_a_loader_of_others_ends_with_the_same_weights(
    tmp_path: Path,
) -> None:
    """Each rank's loader continues at its own position, in a pass of its length."""
    whole = train_on(2, config_for(tmp_path / "whole"), train_on_theirs)
    death = {"die_at": 6, "die_on": 1, "die_after": 4}
    assert Died(-9) in train_on(2, config_for(tmp_path, options=death), train_on_theirs)
    found = train_on(2, config_for(tmp_path), train_on_theirs)
    assert [each["made"] for each in found] == [each["made"][4:] for each in whole]
    assert {each["sha256"] for each in found} == {whole[0]["sha256"]}


def refused_or_begun(ctx: RankContext) -> str:
    """Go over a loader of others; return the error."""
    try:
        train_on_theirs(ctx)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.extended
def test_places_in_a_loader_of_others_are_of_one_number_of_ranks(tmp_path: Path) -> None:
    """Another number of ranks is refused, and the way out makes the remaining steps."""
    death = {"die_at": 6, "die_on": 1, "die_after": 4}
    assert Died(-9) in train_on(2, config_for(tmp_path, options=death), train_on_theirs)
    (refused,) = train_on(1, config_for(tmp_path), refused_or_begun)
    assert "whose position was saved by each of 2 ranks" in refused
    begin = {"on_other_world_size": "begin"}
    assert begin["on_other_world_size"] in refused
    (found,) = train_on(1, config_for(tmp_path, options=begin), train_on_theirs)
    assert len(found["made"]) == NUM_STEPS - 4


def begin_differently(ctx: RankContext) -> str:
    """Count another number of steps on one rank; return the error."""
    try:
        list(ctx.steps(total=3 + ctx.rank))
    except InvalidParamsError as error:
        return str(error)
    return ""


def test_ranks_that_count_differently_are_refused(tmp_path: Path) -> None:
    """At least one rank raises before a step is made."""
    answers = train_on(2, config_for(tmp_path, None), begin_differently)
    assert any("ranks began ctx.steps differently: rank" in each for each in answers)
    assert any("has total=" in each for each in answers)


def stop_on_one(ctx: RankContext) -> int:
    """Ask for a stop on one rank."""
    for step in ctx.steps(total=math.inf):
        if ctx.rank == 1 and step == 4:
            ctx.request_stop("the test says so")
    return ctx.step


def test_a_stop_that_one_rank_asks_for_comes_after_one_step(tmp_path: Path) -> None:
    """All ranks stop after the same step, though nothing else connects their steps."""
    (step,) = set(train_on(2, config_for(tmp_path, None), stop_on_one))
    assert step >= 4
