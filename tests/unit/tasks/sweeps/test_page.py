"""The page of a sweep."""

import base64
import re

import pytest

from prefect_torch_ddp.tasks.report.page.links import Links
from prefect_torch_ddp.tasks.report.page.plot import COLOURS, PALE
from prefect_torch_ddp.tasks.sweeps.page import MAX_ROWS, Trial, best_of, render_sweep
from prefect_torch_ddp.tasks.sweeps.report import _score
from tests.support.pages import HOSTILE, RECORD


def trial(number: int, *, score: float = 0.5, **given: object) -> Trial:
    """Return a completed trial with a falling curve of loss and of rmse."""
    fields = {"run_id": f"fit-{number}", "state": "completed", "num_steps": 1000}
    record = RECORD.model_copy(update={**fields, "arguments": given})
    curve = [(step, score + 1 / step) for step in range(1, 10)]
    return Trial(record, score, {"loss": curve, "rmse": curve})


def pictures(page: str) -> list[str]:
    """Return the SVGs of a page."""
    found = re.findall(r"base64,([A-Za-z0-9+/=]+)\)", page)
    return [base64.b64decode(each).decode() for each in found]


def test_only_what_differs_has_a_column() -> None:
    """An argument that all calls share has none; one that a call lacks has."""
    trials = [trial(1, lr=0.1, epochs=4), trial(2, lr=0.2, epochs=4, warm_up=3)]
    page = render_sweep("fit", trials, "rmse", Links())
    assert "| lr | warm_up | rmse | state | steps | took | run |" in page
    assert "| 0.1 |  | 0.5 | completed | 1,000 |" in page
    assert "Best: rmse 0.5 with lr 0.1" in page
    assert 'resume_from="fit-1"' in page


def test_the_seeds_of_a_sweep_over_seeds_have_a_column() -> None:
    """Though they are options of the task; an argument that is called so stays what it is."""
    first, second = trial(1, lr=0.1), trial(2, lr=0.1)
    record = second.record.model_copy(update={"seed": 18})
    trials = [first, Trial(record, second.score, second.curves)]
    assert "| seed | rmse | state |" in render_sweep("fit", trials, "rmse", Links())
    assert best_of(trials, "rmse") == "Best: rmse 0.5 with seed 17"
    assert best_of([trial(1, seed=3), trial(2, seed=4)], "rmse") == "Best: rmse 0.5 with seed 3"


def test_arguments_without_a_column_are_counted() -> None:
    """A page has room for six that differ, and says how many more do."""
    many = [trial(i, **{f"a{name}": name + i for name in range(8)}) for i in (1, 2)]
    page = render_sweep("fit", many, "rmse", Links())
    assert "| a0 | a1 | a2 | a3 | a4 | a5 | rmse |" in page
    assert "2 more arguments differ: a6, a7." in page
    few = render_sweep("fit", [trial(1, lr=1), trial(2, lr=2)], "rmse", Links())
    assert "more arguments differ" not in few


def test_the_best_curves_have_colours_and_the_others_are_pale() -> None:
    """Of ten calls four are named, in each of the two pictures."""
    trials = [trial(number, score=number / 10, lr=number) for number in range(1, 11)]
    found = pictures(render_sweep("fit", trials, "rmse", Links()))
    assert len(found) == 2
    for picture in found:
        assert all(colour in picture for colour in COLOURS)
        assert "lr 4" in picture
        assert "lr 5" not in picture
        assert picture.count(f'stroke="{PALE}"') == 6 + 1, "and the axes"


def test_a_call_that_failed_has_a_row_with_its_cause() -> None:
    """It has no score, and nothing in its texts becomes markup."""
    failed = trial(2, score=float("inf"), name=HOSTILE)
    record = failed.record.model_copy(update={"state": "failed", "cause": HOSTILE})
    trials = [trial(1, name="plain"), Trial(record, float("inf"), {})]
    page = render_sweep("fit", trials, "rmse", Links())
    assert "1 of 2 calls were completed" in page
    assert "|  | failed: " in page
    assert "<script>" not in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_a_large_sweep_is_cut() -> None:
    """The page has the best 200 calls, says how many more there are, and stays small."""
    trials = [trial(number, score=number, lr=number) for number in range(MAX_ROWS + 50)]
    page = render_sweep("fit", trials, "rmse", Links())
    assert "50 more aren't shown" in page
    assert page.count("completed |") == MAX_ROWS
    assert len(page) < 400_000


def test_equal_calls_are_named_by_their_ids() -> None:
    """If nothing differs, there is no column, and the curves have the runs' ids."""
    page = render_sweep("fit", [trial(1, lr=1), trial(2, lr=1)], "loss", Links())
    assert "| loss | state | steps | took | run |" in page
    assert "fit-2" in pictures(page)[0]


def test_two_calls_that_were_given_the_same_have_a_curve_each() -> None:
    """The second one has its run's id."""
    trials = [trial(1, score=0.1, lr=1), trial(2, score=0.2, lr=1), trial(3, score=0.3, lr=2)]
    for picture in pictures(render_sweep("fit", trials, "rmse", Links())):
        assert all(label in picture for label in ("lr 1", "fit-2", "lr 2"))
    assert best_of(trials, "rmse") == "Best: rmse 0.1 with lr 1"


@pytest.mark.parametrize(("best_mode", "expected"), [("min", 0.25), ("max", 0.5)])
def test_a_best_value_counts_only_if_it_is_the_best_in_the_sweeps_sense(
    best_mode: str, expected: float
) -> None:
    """The largest loss of a call, by which its checkpoints were ranked, isn't its best one."""
    ranked = {"state": "completed", "best_metric": "loss", "best_mode": best_mode}
    record = RECORD.model_copy(update={**ranked, "best_value": 0.25, "metrics": {"loss": 0.5}})
    assert _score(record, "loss", "min") == expected


def test_a_best_value_that_no_checkpoint_has_is_the_last_one() -> None:
    """The call was refused as if it had reported nothing: it made no checkpoint after a report."""
    kept = {"state": "completed", "best_metric": "loss", "best_mode": "min", "best_value": None}
    record = RECORD.model_copy(update={**kept, "metrics": {"loss": 0.5}})
    assert _score(record, "loss", "min") == 0.5
