"""The reports' text: complete, safe from hostile names, true to the numbers."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from prefect_torch_ddp.params import TrainParams
from prefect_torch_ddp.protocol.events import Progress
from prefect_torch_ddp.results import (
    CheckpointRef,
    ClassScore,
    DatasetReport,
    EpochRow,
    Report,
    TrainingSummary,
    TrainReport,
)
from prefect_torch_ddp.tasks.report.live import MAX_POINTS, History
from prefect_torch_ddp.tasks.report.markdown import code, code_block, duration, number, text
from prefect_torch_ddp.tasks.report.report import (
    LiveView,
    confusion_table,
    epoch_table,
    progress_line,
    render_live,
    render_report,
)
from prefect_torch_ddp.tasks.report.run_record import RunRecord, git_commit, read_run_record

RECORD = RunRecord("0.1.0", "abc123-dirty", {"python": "3.11.7", "torch": "2.15.0"})
CURVE = "![training curves](data:image/svg+xml;base64,AAAA)"
HOSTILE = "a|b `c` <script>alert(1)</script> **d** [e](http://f)\n# g __h__ ~~i~~ \\"


def evaluation(names=("cat", "dog"), matrix=((3, 1), (0, 4))) -> Report:
    """Make an evaluation of two classes."""
    scores = tuple(
        ClassScore(name=name, precision=1.0, recall=0.75, f1=0.857142, support=4) for name in names
    )
    return Report(num_samples=8, accuracy=0.875, loss=0.25, classes=scores, confusion_matrix=matrix)


def report(**changes) -> TrainReport:
    """Make the report of a run that resumed once."""
    last = CheckpointRef(
        step=400,
        attempt=2,
        uri="s3://bucket/runs/r/checkpoints/step-00000400/000002/manifest.json",
        metrics={"acc": 0.5},
    )
    values = {
        "run_id": "calm-otter-12345678",
        "flow_run_url": None,
        "dataset": DatasetReport(
            dataset_id="d",
            uri="s3://bucket/data/d",
            num_files=3,
            num_bytes=1_234_567,
            digest="9f2c",
        ),
        "training": TrainingSummary(
            run_id="calm-otter-12345678",
            attempt=2,
            world_size=4,
            num_steps=400,
            num_epochs=10,
            duration_s=200.4,
            value={},
            last_checkpoint=last,
            resumed_from_step=200,
        ),
        "epochs": (
            EpochRow(
                epoch=1,
                num_steps=40,
                num_samples=1280,
                metrics={"loss": 0.123456, "validation_accuracy": 0.5},
            ),
            EpochRow(epoch=2, num_steps=40, num_samples=1280, metrics={"loss": math.nan}),
        ),
        "evaluation": evaluation(),
        "checkpoint": last,
        "model_uri": "s3://bucket/runs/r/model.pt",
    }
    return TrainReport(**(values | changes))


def cells(row: str) -> list[str]:
    """Split a table's row at the bars that aren't escaped."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def tables(markdown: str) -> list[list[list[str]]]:
    """Find all tables, as rows of cells; the second row is the rule."""
    found: list[list[list[str]]] = [[]]
    for row in markdown.splitlines():
        if row.startswith("|"):
            found[-1].append(cells(row))
        elif found[-1]:
            found.append([])
    return [rows for rows in found if rows]


def test_the_report_has_all_that_a_reader_asks_for():
    """The report has all that a reader asks for."""
    markdown = render_report(
        report(), TrainParams(workload="flows.digits", seed=17), RECORD, CURVE, time_lost_s=12.0
    )
    assert markdown.splitlines()[0] == "# flows.digits: accuracy 87.50 %, loss 0.25, 8 samples"
    assert CURVE in markdown
    facts = {row[0]: row[1] for row in tables(markdown)[-1]}
    assert facts["run"] == "`calm-otter-12345678`"
    assert facts["code"] == "prefect-torch-ddp 0.1.0"
    assert facts["git commit"] == "`abc123-dirty`"
    assert (facts["python"], facts["torch"]) == ("3.11.7", "2.15.0")
    assert facts["dataset digest"] == "`9f2c`"
    assert facts["seed"] == "17"
    assert facts["attempts"] == "2, resumed from step 200"
    assert facts["training time of the last attempt"] == "3 min 20 s"
    assert facts["time lost to failures"] == "12 s"


def test_every_table_row_has_as_many_cells_as_its_header_also_with_hostile_names():
    """Every table row has as many cells as its header also with hostile names."""
    hostile = report(
        evaluation=evaluation(names=(HOSTILE, "|")),
        epochs=(
            EpochRow(epoch=1, num_steps=1, num_samples=1, metrics={HOSTILE: 1.0, "|`|": math.inf}),
        ),
    )
    markdown = render_report(hostile, TrainParams(), RECORD)
    for rows in tables(markdown):
        assert {len(row) for row in rows} == {len(rows[0])}
        assert len(rows) >= 3
    assert "<script" not in markdown


def test_a_hostile_name_is_shown_and_starts_nothing():
    """A hostile name is shown and starts nothing."""
    shown = text(HOSTILE)
    assert "\n" not in shown
    assert not re.search(r"(?<!\\)[|`*\[\]~]|[<>]|(?<!\\)__", shown)
    assert text("validation_loss") == "validation_loss"


@pytest.mark.parametrize(
    ("value", "expected"),
    [("a", "`a`"), ("a`b", "``a`b``"), ("`a", "`` `a ``"), ("a|b", "`a\\|b`"), ("", "")],
)
def test_code_spans_hold_what_they_are_given(value, expected):
    """Code spans hold what they are given."""
    assert code(value) == expected


def test_a_code_block_cannot_be_ended_from_inside():
    """A code block cannot be ended from inside."""
    assert code_block("x = '```'").splitlines()[0] == "````python"


def test_the_confusion_matrix_has_true_rows_and_predicted_columns_by_name():
    """The confusion matrix has true rows and predicted columns by name."""
    header, _rule, *rows = tables(confusion_table(evaluation()))[0]
    assert header[1:] == ["cat", "dog"]
    assert rows == [["cat", "**3**", "1"], ["dog", "0", "**4**"]]


def test_a_wide_matrix_numbers_its_columns_and_names_its_rows():
    """A wide matrix numbers its columns and names its rows."""
    names = [f"a rather long class name {i}" for i in range(12)]
    matrix = tuple(
        tuple(i + 5 if i == j else int((i, j) == (2, 7)) for j in range(12)) for i in range(12)
    )
    most, whole = tables(confusion_table(evaluation(names, matrix)))
    assert most[2:] == [[names[2], names[7], "1", "12.50 %"]]
    assert whole[0][1:] == [str(i) for i in range(1, 13)]
    assert whole[2 + 2][0] == f"3 {names[2]}"
    assert whole[2 + 2][8] == "1"


def test_a_matrix_of_many_classes_is_plain_text_that_a_page_can_scroll():
    """A matrix of many classes is plain text that a page can scroll."""
    names = [f"`` `class {i}" for i in range(21)]
    matrix = tuple(
        tuple(30 + i if i == j else int((i, j) == (2, 7)) for j in range(21)) for i in range(21)
    )
    markdown = confusion_table(evaluation(names, matrix))
    block = re.search(r"^(```+)text\n(.*)\n\1$", markdown, re.DOTALL | re.MULTILINE)[2].splitlines()
    assert block[0].split()[-21:] == [str(i) for i in range(1, 22)]
    assert len({len(row) for row in block}) == 1
    for i, row in enumerate(block[1:]):
        assert row.startswith(f"{i + 1} {names[i]}")
        assert [0 if cell == "." else int(cell) for cell in row.split()[-21:]] == list(matrix[i])


def test_a_matrix_too_large_to_read_gives_way_to_its_confusions():
    """A matrix too large to read gives way to its confusions."""
    matrix = tuple(
        tuple(2 if i == j else int(j == i + 1) for j in range(1000)) for i in range(1000)
    )
    markdown = confusion_table(evaluation([f"c{i}" for i in range(1000)], matrix))
    assert "1000 classes" in markdown
    assert len(markdown) < 2_000
    assert ["c0", "c1", "1", "33.33 %"] in tables(markdown)[0]


def test_a_matrix_without_class_names_shows_their_numbers():
    """A matrix without class names shows their numbers."""
    bare = Report(num_samples=2, accuracy=1.0, confusion_matrix=((1, 0), (0, 1)))
    assert tables(confusion_table(bare))[0][0][1:] == ["0", "1"]


def test_an_evaluation_of_a_loss_alone_and_no_epochs_makes_a_report():
    """An evaluation of a loss alone and no epochs makes a report."""
    bare = report(
        evaluation=Report(num_samples=1, loss=1.5, metrics={"perplexity": 4.5}), epochs=()
    )
    markdown = render_report(bare, TrainParams(), RunRecord("0.1.0", None, {}))
    assert markdown.startswith("# flows.digits: loss 1.5, perplexity 4.5, 1 samples")
    assert "Confusion" not in markdown
    assert "git commit" not in markdown


def test_the_epoch_table_says_nan_and_leaves_blank_what_was_not_measured():
    """The epoch table says nan and leaves blank what was not measured."""
    header, _rule, first, second = tables(epoch_table(report().epochs))[0]
    assert header == ["epoch", "steps", "samples", "loss", "validation_accuracy"]
    assert first == ["1", "40", "1,280", "0.1235", "0.5"]
    assert second == ["2", "40", "1,280", "nan", ""]


def test_of_many_epochs_the_newest_are_shown():
    """Of many epochs the newest are shown."""
    rows = [
        EpochRow(epoch=epoch, num_steps=1, num_samples=1, metrics={"loss": 1.0})
        for epoch in range(1, 301)
    ]
    markdown = epoch_table(rows)
    assert tables(markdown)[0][-1][0] == "300"
    assert "The first 250 epochs are left out." in markdown


def test_the_live_report_shows_where_the_training_is():
    """The live report shows where the training is."""
    view = LiveView(
        run_id="calm-otter",
        workload="flows.digits",
        world_size=4,
        attempt=2,
        elapsed_s=65,
        progress=Progress(step=120, epoch=3, total_steps=400),
        metrics={"loss": 0.12345, HOSTILE: math.nan},
        steps_per_s=7.0,
        eta_s=40.2,
    )
    markdown = render_live(view, CURVE)
    assert markdown.startswith("# Training: epoch 3, step 120/400, loss 0.1235")
    assert CURVE in markdown
    facts = {row[0]: row[1] for row in tables(markdown)[0]}
    assert (facts["Run"], facts["World size"], facts["Attempt"]) == ("`calm-otter`", "4 ranks", "2")
    assert (facts["Elapsed"], facts["Throughput"], facts["ETA"]) == (
        "1 min 5 s",
        "7 steps/s",
        "40 s",
    )
    assert tables(markdown)[1][2:] == [["loss", "0.1235"], [text(HOSTILE), "nan"]]
    assert "checkpoint" not in markdown


def test_the_live_report_says_since_when_there_is_no_checkpoint():
    """Right below its title, harmless whatever the reason says."""
    progress = Progress(120, 3, 400, trouble=f"no checkpoint since step 40: {HOSTILE}")
    view = LiveView(
        run_id="r", workload="w", world_size=4, attempt=2, elapsed_s=65, progress=progress
    )
    lines = [line for line in render_live(view, CURVE).splitlines() if line]
    assert lines[:2] == [
        "# Training: epoch 3, step 120/400",
        f"**no checkpoint since step 40: {text(HOSTILE)}**",
    ]


def test_the_progress_line_is_plain_and_says_how_it_ended():
    """The progress line is plain and says how it ended."""
    view = {"run_id": "r", "workload": "w", "world_size": 1, "attempt": 1, "elapsed_s": 1.0}
    running = Progress(step=120, epoch=3, total_steps=400)
    line = progress_line(LiveView(**view, progress=running, metrics={"loss": 0.123}, eta_s=40.0))
    assert line == "epoch 3, step 120/400, loss 0.123, ETA 40 s"
    assert (
        progress_line(LiveView(**view, status="stopped", progress=running, eta_s=9.0))
        == "epoch 3, step 120/400, stopped"
    )
    assert progress_line(LiveView(**view, progress=Progress(5, 1, None))) == "epoch 1, step 5"
    assert progress_line(LiveView(**view)) == "no step yet"
    assert progress_line(LiveView(**view, status="stopped")) == "stopped before the first step"


def test_history_knows_speed_time_left_and_epoch_ends():
    """History knows speed time left and epoch ends."""
    history = History()
    for step in range(1, 101):
        history.add(Progress(step, (step - 1) // 40 + 1, 400, {"loss": 1 / step}), now_s=step * 0.5)
    assert history.steps_per_s == pytest.approx(2.0)
    assert history.eta_s == pytest.approx(150.0)
    assert history.percent == 25.0
    assert history.epoch_ends == [40, 80]
    assert history.curves["loss"][-1] == (100, 0.01)


def test_history_forgets_what_a_restart_does_again():
    """History forgets what a restart does again."""
    history = History()
    for step in range(1, 51):
        history.add(Progress(step, (step - 1) // 20 + 1, 100, {"loss": 1.0}), now_s=float(step))
    history.add(Progress(31, 2, 100, {"loss": 2.0}), now_s=80.0)
    assert history.curves["loss"][-2:] == [(30, 1.0), (31, 2.0)]
    assert history.epoch_ends == [20]
    assert history.steps_per_s is None
    history.add(Progress(32, 2, 100, {"loss": 2.0}), now_s=81.0)
    assert history.steps_per_s == pytest.approx(1.0)


def test_history_stays_small_and_follows_a_change_of_speed():
    """History stays small and follows a change of speed."""
    history = History()
    for step in range(1, 20_001):
        now_s = step / 10 if step < 10_000 else 1000 + (step - 10_000) / 100
        history.add(Progress(step, 1, None, {"loss": float(step)}), now_s)
    assert len(history.curves["loss"]) <= MAX_POINTS
    assert (history.curves["loss"][0], history.curves["loss"][-1]) == ((1, 1.0), (20_000, 20_000.0))
    assert history.steps_per_s == pytest.approx(100.0, rel=0.01)
    assert (history.eta_s, history.percent) == (None, 0.0)


def test_two_events_of_one_step_are_one_point_and_both_metrics():
    """Two events of one step are one point and both metrics."""
    history = History()
    history.add(Progress(1, 1, 10, {"loss": 1.0}), now_s=0.0)
    history.add(Progress(1, 1, 10, {"loss": 0.5, "validation_loss": 2.0}), now_s=0.0)
    assert history.curves == {"loss": [(1, 0.5)], "validation_loss": [(1, 2.0)]}
    assert history.steps_per_s is None


def test_the_run_record_reads_versions_without_importing_torch():
    """The run record reads versions without importing torch."""
    program = (
        "import sys; from prefect_torch_ddp.tasks.report.run_record import read_run_record\n"
        "record = read_run_record(); print(record.code_version, record.versions['torch'])\n"
        "assert not {'torch', 'prefect', 'dask'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert re.fullmatch(r"\d+\.\d+\S* \d+\.\d+\S*\n", done.stdout)
    assert set(read_run_record().versions) == {"python", "torch", "prefect", "dask", "distributed"}


def test_the_git_commit_is_that_of_the_folder_and_says_when_files_differ(tmp_path: Path):
    """The git commit is that of the folder and says when files differ."""
    assert git_commit(tmp_path) is None
    assert git_commit(tmp_path / "absent") is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", str(tmp_path)]
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{commit}-dirty"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.44, "0.4 s"),
        (40, "40 s"),
        (59.7, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (math.inf, "inf"),
    ],
)
def test_durations_read_as_a_person_says_them(seconds, expected):
    """Durations read as a person says them."""
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.123456, "0.1235"), (3, "3"), (-math.inf, "-inf"), (math.nan, "nan"), (1e-7, "1e-07")],
)
def test_numbers_have_four_digits_that_matter(value, expected):
    """Numbers have four digits that matter."""
    assert number(value) == expected
