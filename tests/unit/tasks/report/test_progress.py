"""How far a training is: speed, time left, and the page while it runs."""

import math

import pytest

from prefect_torch_ddp.protocol.events import AttemptBegan, Progress
from prefect_torch_ddp.tasks.report.markdown import text
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from tests.support.pages import HOSTILE, RECORD, metric_curves, page_of, tables

METRICS = {"accuracy": 0.5, "loss": 0.12345, "third": 3.0}
LINE = "epoch 3/10 · step 120/400 · loss 0.1235 · accuracy 0.5"
FAILED = LINE.replace("step 120/400", "120 of 400 steps done")


def training(*steps: tuple[int, float], total: int | None = 400, **changes) -> TrainingProgress:
    """Make a training that was heard of at steps, each with its time."""
    made = TrainingProgress(world_size=4)
    made.read(METRICS, attempt=1)
    for step, now_s in steps:
        more = {"total_epochs": total and total // 40, "num_samples": 116 * step}
        made.add(Progress(step, (step - 1) // 40 + 1, total, **more), now_s)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_step_after_a_restart_has_no_loss_of_the_attempt_before_it():
    """Its own loss is shown as soon as records of the new attempt have been read."""
    shown = TrainingProgress(world_size=2)
    shown.begin_attempt(AttemptBegan(1, 2))
    shown.add(Progress(20, 1, 105), 0.0)
    shown.read({"loss": 0.343}, attempt=1)
    assert shown.line == "epoch 1 · step 20/105 · loss 0.343"
    shown.begin_attempt(AttemptBegan(2, 2))
    shown.add(Progress(1, 1, 105), 10.0)
    assert shown.line == "epoch 1 · step 1/105"
    shown.read({"loss": 0.343}, attempt=1)
    assert shown.line == "epoch 1 · step 1/105"
    shown.read({"loss": 2.3}, attempt=2)
    assert shown.line == "epoch 1 · step 1/105 · loss 2.3"


def test_a_training_that_failed_before_its_new_attempt_recorded_shows_what_there_is():
    """What was recorded last is then no promise for the steps to come."""
    shown = TrainingProgress(world_size=2)
    shown.add(Progress(20, 1, 105), 0.0)
    shown.begin_attempt(AttemptBegan(2, 2))
    shown.status = "failed"
    shown.read({"loss": 0.343}, attempt=1)
    assert shown.line == "epoch 1 · 20 of 105 steps done · loss 0.343 · failed"


def test_the_page_shows_where_the_training_is():
    """Facts, the last metrics, parameters, the curve; what isn't known has no section."""
    shown = training((50, 0.0), (120, 10.0))
    shown.begin_attempt(AttemptBegan(2, 3))
    shown.read({**METRICS, HOSTILE: math.nan}, attempt=2)
    shown.checkpoint_every_s = 5.0
    for now_s, step in ((20.0, 100), (30.0, 170)):
        shown.add(Progress(step, 3, 400, total_epochs=10, num_samples=8 * step), now_s)
    given = {
        "arguments": {"lr": 0.1, "text": "x" * 10_000, "storage": "mine"},
        "parameters": {"checkpoint": {"every_steps": 5, "keep_last": 2}, "storage": "/s"},
    }
    record = RECORD.model_copy(update={"attempts": (), **given})
    markdown = page_of(shown, record, elapsed_s=65, curves=metric_curves(lr=[1.0, 1.5, 2.0]))
    line = "epoch 3/10 · step 170/400 · loss 0.1235 · accuracy 0.5 · 56 samples/s · 33 s left"
    assert markdown.startswith(f"# digits: training\n\n{line}\n")
    assert "![training curves](data:image/svg+xml;base64," in markdown
    facts, metrics, parameters, _ = tables(markdown)
    assert facts[2:] == [
        ["Run", f"`{record.run_id}`"],
        ["World size", "3 ranks"],
        ["Attempt", "2"],
        ["Checkpoints", "every 5 steps; by time, every 5.0 s"],
        ["Elapsed", "1 min 5 s"],
    ]
    assert ["lr", "2", "1 (step 1)", "2 (step 3)"] in metrics
    assert parameters[2:] == [
        ["checkpoint.every_steps", "`5`"],
        ["storage", "`/s`"],
        ["lr", "`0.1`"],
        ["text", f"`{'x' * 200} ...`"],
        ["storage", "`mine`"],
    ]
    titles = [line for line in markdown.splitlines() if line.startswith("## ")]
    assert titles == ["## Metrics", "## Parameters and options", "## Run record"]


def test_parameters_that_have_no_room_are_counted():
    """After those of the run itself, which are fewer."""
    given = {"parameters": {"max_restarts": 7}, "options": {f"o{i}": i for i in range(200)}}
    page = page_of(training(), RECORD.model_copy(update=given))
    rows = tables(page.partition("## Parameters and options")[2])[0][2:]
    assert rows[:2] == [["max_restarts", "`7`"], ["options.o0", "`0`"]]
    assert (len(rows), rows[-1]) == (101, ["...", "101 more"])


def test_the_page_says_since_when_there_is_no_checkpoint():
    """Right below its title, harmless whatever the reason says."""
    newest = Progress(120, 3, 400, trouble=f"no checkpoint since step 40: {HOSTILE}")
    lines = [line for line in page_of(training(newest=newest, metrics={})).splitlines() if line]
    trouble = f"**no checkpoint since step 40: {text(HOSTILE)}**"
    assert lines[:3] == ["# digits: training", "epoch 3 · step 120/400", trouble]


def test_the_page_of_a_failed_training_says_why():
    """The cause as it is, in a block that nothing in it can leave, and not without end. A retry
    whose gang finds no workers, so that no attempt begins, doesn't show an earlier one's step."""
    cause = f"RankFailedError: boom\n```\n<script>{HOSTILE}" + "x" * 100_000
    shown = training((50, 0.0), (120, 10.0), status="failed", cause=cause)
    attempt = RECORD.attempts[0].model_copy(update={"step": 120})
    record = RECORD.model_copy(update={"attempts": (attempt,)})
    page = page_of(shown, record)
    assert page.splitlines()[:5:2] == ["# digits: failed in step 120", FAILED, "**Cause**"]
    fence = page.splitlines()[6].removesuffix("text")
    block = page.split(f"{fence}text\n")[1].split(f"\n{fence}\n")[0]
    assert cause.startswith(block.removesuffix(" ..."))
    assert 1_000 < len(block) < 3_000
    without_a_step = page_of(training(status="failed"), record)
    assert without_a_step.startswith("# digits: failed\n\nfailed, no step was reported\n")


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (training((50, 0.0), (120, 10.0)), f"{LINE} · 812 samples/s · 40 s left"),
        (
            training((1, 0.0), (1240, 1000.0), total=4000, metrics={}),
            "epoch 31/100 · step 1,240/4,000 · 144 samples/s · 37 min left",
        ),
        (training((50, 0.0), (120, 10.0), status="failed"), f"{FAILED} · failed"),
        (training((5, 0.0), total=None, metrics={}), "epoch 1 · step 5"),
        (training(), "no step yet"),
        (training((5, 0.0), waiting="waiting for workers: 3 of 8"), "waiting for workers: 3 of 8"),
        (training(status="cancelled"), "cancelled, no step was reported"),
    ],
)
def test_the_progress_line_is_plain_and_says_how_it_ended(shown: TrainingProgress, line: str):
    """One line, for the progress bar."""
    assert shown.line == line


def test_a_call_of_one_epoch_has_no_totals_to_show():
    """It may be one of many in a loop over epochs: nothing says 100 % all night."""
    shown = training((120, 0.0))
    shown.add(Progress(130, 3, 160, "", 3, 116 * 130, may_continue=True), 10.0)
    line = "epoch 3 · step 130 · loss 0.1235 · accuracy 0.5 · 116 samples/s"
    assert (shown.line, shown.percent, shown.eta_s) == (line, 0.0, None)
    shown.status = "trained"
    assert shown.percent == 100.0


def test_speed_is_that_of_the_last_half_minute_and_begins_anew_at_a_restart():
    """A restart's pause isn't in it; without a known length there is no time left to tell."""
    steps = [(step, step / 10 if step < 1000 else 90 + step / 100) for step in range(1, 9000)]
    shown = training(*steps, total=None)
    assert shown.steps_per_s == pytest.approx(100.0, rel=0.01)
    assert (shown.eta_s, shown.percent) == (None, 0.0)
    shown.add(Progress(31, 1, 124), 500.0)
    assert shown.steps_per_s is None
    shown.add(Progress(32, 1, 124), 501.0)
    assert (shown.steps_per_s, shown.eta_s) == (pytest.approx(1.0), pytest.approx(92.0))
    assert shown.percent == pytest.approx(100 * 32 / 124)
