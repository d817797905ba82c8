"""How far a training is: speed, time left, and the text of the live report."""

import math

import pytest

from prefect_torch_ddp.protocol.events import AttemptBegan, Progress
from prefect_torch_ddp.tasks.report.live import TrainingProgress, render_live
from prefect_torch_ddp.tasks.report.markdown import text
from tests.unit.tasks.report.test_report import CURVE, HOSTILE, tables


def training(*steps: tuple[int, float], total: int | None = 400, **changes) -> TrainingProgress:
    """Make a training that was heard of at steps, each with its time."""
    made = TrainingProgress("calm-otter", "prefect_torch_ddp.examples.digits", 4)
    for step, now_s in steps:
        made.add(Progress(step, (step - 1) // 40 + 1, total, {"loss": 0.12345}), now_s)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_the_live_report_shows_where_the_training_is():
    """Facts, rank 0's newest metrics, and the curve."""
    shown = training((50, 0.0), (120, 10.0))
    shown.begin_attempt(AttemptBegan(2, 3))
    shown.metrics[HOSTILE] = math.nan
    markdown = render_live(shown, 65, curve=CURVE)
    assert markdown.startswith("# Training: epoch 3, step 120/400, loss 0.1235")
    assert CURVE in markdown
    facts = {row[0]: row[1] for row in tables(markdown)[0]}
    assert (facts["Run"], facts["World size"], facts["Attempt"]) == ("`calm-otter`", "3 ranks", "2")
    speed = (facts["Elapsed"], facts["Throughput"], facts["ETA"])
    assert speed == ("1 min 5 s", "7 steps/s", "40 s")
    assert tables(markdown)[1][2:] == [["loss", "0.1235"], [text(HOSTILE), "nan"]]
    assert "checkpoint" not in markdown


def test_the_live_report_says_since_when_there_is_no_checkpoint():
    """Right below its title, harmless whatever the reason says."""
    newest = Progress(120, 3, 400, trouble=f"no checkpoint since step 40: {HOSTILE}")
    lines = [line for line in render_live(training(newest=newest), 65).splitlines() if line]
    assert lines[:2] == [
        "# Training: epoch 3, step 120/400",
        f"**no checkpoint since step 40: {text(HOSTILE)}**",
    ]


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (training((50, 0.0), (120, 10.0)), "epoch 3, step 120/400, loss 0.1235, ETA 40 s"),
        (
            training((50, 0.0), (120, 10.0), status="stopped"),
            "epoch 3, step 120/400, loss 0.1235, stopped",
        ),
        (training((5, 0.0), total=None, metrics={}), "epoch 1, step 5"),
        (training(), "no step yet"),
        (training(status="stopped"), "stopped before the first step"),
    ],
)
def test_the_progress_line_is_plain_and_says_how_it_ended(shown: TrainingProgress, line: str):
    """One line, for the progress bar."""
    assert shown.line == line


def test_speed_is_that_of_the_last_half_minute_and_begins_anew_at_a_restart():
    """A restart's pause isn't in it; without a known length there is no time left to tell."""
    steps = [
        (step, step / 10 if step < 1000 else 100 + (step - 1000) / 100) for step in range(1, 9000)
    ]
    shown = training(*steps, total=None)
    assert shown.steps_per_s == pytest.approx(100.0, rel=0.01)
    assert (shown.eta_s, shown.percent) == (None, 0.0)
    shown.add(Progress(31, 1, 124, {"accuracy": 0.5}), 500.0)
    assert shown.steps_per_s is None
    shown.add(Progress(32, 1, 124), 501.0)
    assert (shown.steps_per_s, shown.eta_s) == (pytest.approx(1.0), pytest.approx(92.0))
    assert shown.percent == pytest.approx(100 * 32 / 124)
    assert shown.metrics == {"loss": 0.12345, "accuracy": 0.5}
