"""The final report's text: complete, safe from hostile names, true to the numbers."""

import ast
import math
import re
from dataclasses import replace

import pytest

from prefect_torch_ddp.protocol.events import Progress
from prefect_torch_ddp.records.timing import TimingLine
from prefect_torch_ddp.results import CheckpointRef, EpochRow, Report
from prefect_torch_ddp.tasks.report.curves import MAX_BINS, Curves, MetricCurves
from prefect_torch_ddp.tasks.report.markdown import code, code_block, duration, number, text
from prefect_torch_ddp.tasks.report.page.checkpoints import (
    KeptCheckpoint,
    checkpoint_list,
    load_code,
)
from prefect_torch_ddp.tasks.report.page.epochs import epoch_table
from prefect_torch_ddp.tasks.report.page.evaluation import confusion_table
from prefect_torch_ddp.tasks.report.page.headline import RunView
from prefect_torch_ddp.tasks.report.page.sections import SECTIONS, render_page
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from tests.support.pages import (
    BEGAN,
    HOSTILE,
    RECORD,
    RUN,
    evaluation,
    metric_curves,
    page_of,
    report,
    tables,
    without_code,
)
from tests.support.records import columns
from tests.support.records import record as a_record

GREEDY = "http://evil.example/a?b=1 https://x.y www.evil.example me@evil.example ![i](//evil/i.png)"
LINKS = re.compile(r"https?://|www\.|\w@\w|mailto:\w|!\[|\]\(", re.IGNORECASE)


def old_record(**changes):
    """Make the record of the previous run."""
    began = BEGAN.replace(day=21, hour=3)
    return RECORD.model_copy(update={"run_id": "old-1", "began": began, **changes})


def linked(markdown: str) -> list[str]:
    """Return what could become a link or an outside image."""
    return LINKS.findall(re.sub(r"\\[^\w\s]", "", without_code(markdown)))


def test_the_report_has_all_that_a_reader_asks_for():
    """The report has all that a reader asks for."""
    markdown = page_of(
        train_report=report(), curves=metric_curves(loss=[3, 2, 1]), logs="/s/runs/r/logs"
    )
    assert "- **Logs**: `/s/runs/r/logs/`" in markdown
    headline = "# digits: finished\n\naccuracy 87.50 %, loss 0.25, 8 samples\n"
    assert markdown.startswith(headline)
    assert "![training curves](data:image/svg+xml;base64," in markdown
    facts = {row[0]: row[1] for row in tables(markdown)[-1][2:]}
    assert facts == facts | {
        "run": f"`{RUN}`",
        "code": "prefect-torch-ddp 0.1.0",
        "git commit": "`abc123-dirty`",
        "python": "3.11.7",
        "torch": "2.15.0",
        "dataset digest": "`9f2c`",
        "seed": "17",
        "split": "train 1,437, val 360",
        "resumed from": "step 200",
    }
    assert tables(markdown)[-2][2:] == [
        ["1", "4", "a, b", "1 min 30 s", "12", text("ValueError: [boom]")],
        ["2", "2", "", "", "", ""],
    ]


@pytest.mark.parametrize(
    ("experiment", "title"),
    [
        ("line/flows.cats/fit:lr=0.1", "fit:lr=0.1"),
        ("line/nightly/flows.cats/fit:a/b:c", "fit:a/b:c"),
        ("exp: cats/flows.cats/fit", "fit"),
        ("train-ddp/nightly/flows.digits", "digits"),
    ],
)
def test_the_title_is_the_tasks_name_with_its_whole_run_key(experiment: str, title: str):
    """The key may contain any character."""
    page = page_of(record=RECORD.model_copy(update={"experiment": experiment}))
    assert page.startswith(f"# {title}: training")


@pytest.mark.parametrize(
    ("policy", "every_s", "shown"),
    [
        ({"every_s": None, "every_steps": 1000}, None, "every 1,000 steps"),
        ({"every_epochs": 1}, 2.0, "every epoch; by time, every 2.0 s"),
        ({}, 2.0, "by time, every 2.0 s"),
    ],
)
def test_all_that_makes_a_checkpoint_due_is_shown(policy, every_s: float | None, shown: str):
    """By steps, by epochs and by time: whichever comes first."""
    record = RECORD.model_copy(update={"parameters": {"checkpoint": policy}})
    page = page_of(TrainingProgress(4, checkpoint_every_s=every_s), record)
    assert ["Checkpoints", shown] in tables(page)[0]


def test_a_huge_and_hostile_run_makes_a_page_below_300_kb_without_a_link():
    """64 ranks, 200 classes, 500 epochs, many metrics, failures and checkpoints, each with a name
    or a text that would put something into the page; what isn't a number is a word."""
    evil = f"{GREEDY} {HOSTILE}"
    names = [f"{evil} {i}" for i in range(200)]
    matrix = tuple(tuple(int(i == j) + int(j == 0) for j in range(200)) for i in range(200))
    row = {name: math.nan if i % 3 else math.inf for i, name in enumerate(names)}
    many = {"num_steps": 10**6, "num_samples": 10**9, "metrics": row}
    whole = report(
        evaluation=evaluation(names, matrix, metrics=row),
        epochs=[{"epoch": epoch, **many} for epoch in range(1, 501)],
    )
    steps = [(step, 1 / step) for step in range(1, 2001)]
    holes = dict.fromkeys(names, 7)
    curves = Curves(dict.fromkeys(names, steps), range(4, 2000, 4), {2: 5, 3: 900}, holes, row)
    kept = [
        KeptCheckpoint(CheckpointRef(step=400, attempt=2, uri=f"s3://b/{i}"), 10**10, "9f" * 32)
        for i in range(500)
    ]
    shown = TrainingProgress(
        status="failed",
        cause=f"```\n{GREEDY}\n{HOSTILE}\n" * 1000,
        metrics=row,
        newest=Progress(5, 1, 10, GREEDY),
    )
    spent = {"step": 9, "waiting": 8}
    ranks = [
        TimingLine(rank, 1, f"{evil} {rank}", HOSTILE, 9, 1e9, 9, 9, 1, 10**12, 10**12, spent)
        for rank in range(64)
    ]
    hosts = tuple(line.host for line in ranks)
    about = {"world_size": 64, "hosts": hosts, "step": 10**6, "cause": evil * 3}
    hostile = {
        "run_id": HOSTILE,
        "experiment": evil,
        "options": dict.fromkeys(names, evil),
        "attempts": (RECORD.attempts[0].model_copy(update=about),) * 99,
    }
    record = RECORD.model_copy(update=hostile)
    view = RunView(record, shown, curves=curves, checkpoints=kept, ranks=ranks)
    for each in (view, replace(view, train_report=whole)):
        page = render_page(each)
        assert 50_000 < len(page.encode()) < 300_000
        assert linked(page) == []
        assert "<" not in without_code(page)
        for rows in tables(page):
            assert {len(row) for row in rows} == {len(rows[0])}
        assert page.count(" MB | 1,000,000 MB |") == 64
        assert "more metrics are left out" in page
        assert "490 older checkpoints are left out" in page or "491 older" in page
    assert linked(text(GREEDY)) == []


def test_a_section_that_is_too_large_gives_way_and_says_so(monkeypatch: pytest.MonkeyPatch):
    """Whatever else there is stays."""
    monkeypatch.setitem(SECTIONS, "Thumbnails", lambda _: "x" * 400_000)
    page = page_of(train_report=report())
    assert len(page) < 20_000
    assert "*Thumbnails* is left out: its 400 kB would make the page too large." in page
    assert "## Run record" in page


@pytest.mark.parametrize(
    ("values", "changes", "says", "compared"),
    [
        (
            {"loss": [3, 1, 2], "val_loss": [5, 3, 4]},
            {},
            "Best val_loss: 3 at step 2",
            "4.5, now 0.5 better",
        ),
        (
            {"loss": [3], "val_loss": [5], "val_acc": [0.25, 0.75, 0.5]},
            {},
            "Best val_acc: 0.75 at step 2",
            "0.625, now 0.125 worse",
        ),
        ({"speed": [3, 9, 2]}, {"best_metric": "speed"}, "Best speed: 9 at step 2", ""),
        ({"val_oddness": [1, 3, 2]}, {}, "", "1, now 1 higher"),
        ({"loss": range(1, 101)}, {}, "", "100, now the same"),
        ({"loss": [100.0000001]}, {}, "", "100, now nearly the same"),
        ({"lr": [0.1]}, {}, "", ""),
        ({}, {}, "", ""),
    ],
    ids=[
        *("a loss", "a score", "the metric of checkpoints", "unknown", "a training"),
        *("a rounding", "rate", "none"),
    ],
)
def test_the_best_value_and_the_last_run_are_compared(values, changes, says: str, compared: str):
    """By what checkpoints are kept by, else a score or a loss on validation data, else the loss."""
    then = {"val_loss": 4.5, "val_acc": 0.625, "other": 1.0, "val_oddness": 1.0, "loss": 100.0}
    record = RECORD.model_copy(update=changes)
    curves, old = metric_curves(**values), old_record(metrics=then)
    page = page_of(TrainingProgress(), record, curves=curves, previous=old)
    assert [line for line in page.splitlines() if line.startswith("Best ")] == [says] * bool(says)
    rows = [row for rows in tables(page) for row in rows if row[0].startswith("last:")]
    assert rows == ([["last: `old-1`", compared, "2026-11-21 03:00"]] if compared else [])


def test_extremes_of_curves_that_are_means_say_so():
    """Six thousand steps are points of four steps each, whose means lie within the extremes."""
    record = RECORD.model_copy(update={"best_metric": "score"})
    steps = [a_record(step, score=step % 2) for step in range(3 * MAX_BINS)]
    page = page_of(record=record, curves=MetricCurves(columns(steps)).snapshot())
    assert "Best score: 0.5 at step 2, as a mean over up to 4 steps" in page
    assert "Lowest and highest are taken from means over 4 steps, like the curves." in page
    few = page_of(record=record, curves=MetricCurves(columns(steps[:99])).snapshot())
    assert "Best score: 1 at step 1\n" in few
    assert "means" not in few


def test_a_finished_run_is_compared_with_the_last_and_the_best_by_its_evaluation():
    """Not by what its training reported. The best is the best of those that completed before."""
    began = BEGAN.replace(day=20)

    def old(run_id: str, accuracy: float, **changes):
        found = Report(num_samples=8, accuracy=accuracy, loss=0.125)
        about = {"run_id": run_id, "evaluation": found, "began": began, "state": "completed"}
        return old_record(**(about | {"metrics": {"accuracy": 0.5}} | changes))

    last, top = old("old-1", 0.75), old("old-2", 0.9)
    earlier = [
        last,
        old("failed", 0.99, state="failed"),
        top,
        old("nan", math.nan),
        old("later", 0.99, began=BEGAN.replace(day=23)),
        old("none", 0.0, evaluation=None),
    ]
    page = page_of(train_report=report(), previous=last, earlier=earlier)
    assert tables(page)[0] == [
        ["compared", "accuracy", "loss", "began (UTC)"],
        [":---"] * 4,
        ["this run", "0.875", "0.25", "2026-11-22 02:00"],
        ["last: `old-1`", "0.75, now 0.125 better", "0.125, now 0.125 worse", "2026-11-20 02:00"],
        ["best: `old-2`", "0.9, now 0.025 worse", "0.125, now 0.125 worse", "2026-11-20 02:00"],
    ]
    both = page_of(train_report=report(), previous=top, earlier=[top])
    assert [row[0] for row in tables(both)[0][3:]] == ["last and best: `old-2`"]
    record = RECORD.model_copy(update={"weights_from": "old-1"})
    origin = page_of(train_report=report(), record=record, previous=last, earlier=[last, top])
    assert tables(origin)[0][3][0] == "its weights are from: `old-1`"


@pytest.mark.parametrize(
    ("status", "saved", "is_tried_again", "says"),
    [
        ("failed", True, False, "remove the cause, then run it with this parameter, to continue"),
        ("cancelled", True, False, "run it with this parameter, to continue after step 400"),
        ("failed", False, False, "remove the cause and run it again. It begins from the start"),
        ("failed", True, True, "nothing yet, Prefect tries it again, from step 400."),
        ("failed", False, True, "nothing yet, Prefect tries it again, from the beginning."),
        ("finished", True, False, ""),
        ("training", True, False, ""),
    ],
)
def test_a_page_says_what_to_do(status, saved: bool, is_tried_again: bool, says: str):
    """Above all curves and tables: state, cause, and the line to copy."""
    record = RECORD.model_copy(update={"checkpoint": report().checkpoint if saved else None})
    shown = TrainingProgress(4, status=status, cause="ValueError: boom" if says else "")
    page = page_of(
        shown, record, is_tried_again=is_tried_again, curves=metric_curves(loss=[3, 2, 1])
    )
    above = page.partition("![")[0]
    assert ("**What to do**" in page) == bool(says)
    assert says in above
    assert (f'```python\nresume_from="{RUN}"\n```' in above) == ("this parameter" in says)
    order = [f"# digits: {status}", "**Cause**", "**What to do**", "Newest checkpoint", "!["]
    found = [page.index(each) for each in order if each in page]
    assert found == sorted(found)
    assert len(found) >= 2


@pytest.mark.parametrize(
    ("is_tried_again", "says"),
    [
        (False, "remove the cause, then run it with this parameter, to begin where it began:"),
        (True, "nothing yet, Prefect tries it again, from where it began."),
    ],
    ids=["over", "tried again"],
)
def test_a_resumed_run_that_saved_nothing_begins_again_where_it_began(
    is_tried_again: bool, says: str
):
    """The checkpoint of the run before is still there."""
    changes = {"checkpoint": None, "parameters": {"resume_from": "old-1"}}
    shown = TrainingProgress(4, status="failed", cause="ValueError: boom")
    page = page_of(shown, RECORD.model_copy(update=changes), is_tried_again=is_tried_again)
    assert says in page
    assert ('resume_from="old-1"' in page) == (not is_tried_again)


def test_a_first_run_by_latest_that_saved_nothing_begins_from_the_start():
    """There was no run to resume: it was told to begin where it began."""
    found_none = RECORD.model_copy(update={"parameters": {"resume_from": "latest"}})
    shown = TrainingProgress(4, status="failed", cause="ValueError: boom")
    page = page_of(shown, found_none)
    assert "remove the cause and run it again. It begins from the start" in page
    assert "from the beginning." in page_of(shown, found_none, is_tried_again=True)
    found_one = found_none.model_copy(update={"began_from": "old-1"})
    assert 'resume_from="old-1"' in page_of(shown, found_one)


def test_models_and_checkpoints_are_listed_once_and_their_places_are_no_links():
    """The model's line comes first, with its card; then the checkpoints, each with its roles, its
    size and its digest; the newest of those that are kept before the older ones."""
    last = report().checkpoint
    older = last.model_copy(update={"step": 200, "uri": "s3://b/200"})
    kept = [KeptCheckpoint(older, 3_400_000, "1a" * 32), KeptCheckpoint(last, 6_800_000, "2a" * 32)]
    model = "s3://bucket/runs/r/model"
    at = "step {}, attempt 2, acc 0.5, {} MB, sha256 `{}`: `{}`"
    assert checkpoint_list(report(), kept).splitlines() == [
        f"- **Weights** of `model`, step 400: `{model}.pt`; their card: `{model}.json`",
        f"- **Evaluated and last checkpoint**, {at.format(400, 6.8, '2a' * 32, last.uri)}",
        f"- **Checkpoint**, {at.format(200, 3.4, '1a' * 32, 's3://b/200')}",
    ]
    assert checkpoint_list(None) == ""


@pytest.mark.parametrize(
    ("num", "ends"),
    [(10, ", m9 9: `s3://b/200`"), (12, ", m9 9 and 2 more metrics: `s3://b/200`")],
)
def test_a_checkpoint_of_many_metrics_says_how_many_are_left_out(num, ends):
    """After the first ten, which are those of its manifest's order."""
    metrics = {f"m{each}": float(each) for each in range(num)}
    ref = report().checkpoint.model_copy(update={"metrics": metrics, "uri": "s3://b/200"})
    (line,) = checkpoint_list(None, [KeptCheckpoint(ref, 1_000, "1a" * 32)]).splitlines()
    assert line.replace(f", 1 kB, sha256 `{'1a' * 32}`", "").endswith(ends)


def test_each_of_several_models_is_shown_with_its_card_and_its_code():
    """By the name that it was tracked under, as those of a GAN."""
    uris = {name: f"/data/models/000001/{name}.safetensors" for name in ("generator", "critic")}
    markdown = page_of(train_report=report(uris))
    for name, uri in uris.items():
        card = f"their card: `/data/models/000001/{name}.json`"
        assert f"- **Weights** of `{name}`, step 400: `{uri}`; {card}" in markdown
        assert f"{name}.load_state_dict(safetensors.torch.load(file.read()))" in markdown


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("place", ["/data/it's/model", "s3://bucket/model"])
def test_the_code_that_loads_the_model_is_three_lines_with_the_right_place(place, suffix):
    """Also of places whose names need quotes, and nothing in a file can run code."""
    source = "\n".join(load_code("model", place + suffix).splitlines()[1:-1])
    assert len(source.splitlines()) == 3
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    assert place + suffix in [node.value for node in nodes]
    assert ("weights_only=True" in source) == (suffix == ".pt")


def test_a_hostile_name_is_shown_and_starts_nothing():
    """A hostile name is shown and starts nothing."""
    shown = text(HOSTILE)
    assert "\n" not in shown
    assert not re.search(r"(?<!\\)[|`*\[\]~]|[<>]|(?<!\\)__", shown)
    assert text("validation_loss") == "validation_loss"


@pytest.mark.parametrize(
    ("show", "expected"),
    [
        (code, {"a": "`a`", "a`b": "``a`b``", "`a": "`` `a ``", "a|b": "`a\\|b`", "": ""}),
        (lambda source: code_block(source).splitlines()[0], {"x = '```'": "````python"}),
        (duration, {0.44: "0.4 s", 40: "40 s", 59.7: "1 min 0 s", 200: "3 min 20 s"}),
        (duration, {7500: "2 h 5 min", math.inf: "inf"}),
        (number, {0.123456: "0.1235", 3: "3", 1e-7: "1e-07", -math.inf: "-inf", math.nan: "nan"}),
    ],
)
def test_values_read_as_a_person_writes_them(show, expected):
    """Code spans hold what they are given; numbers have four digits that matter."""
    assert {value: show(value) for value in expected} == expected


def test_there_is_one_confusion_matrix():
    """A picture, with the names of the classes or else their numbers, and the pairs below it."""
    for names, shown in ((("cat", "dog"), ("cat", "dog")), ((), ("0", "1"))):
        markdown = confusion_table(evaluation(names))
        assert markdown.count("![confusion matrix]") == 1
        assert tables(markdown) == [
            [
                ["true", "predicted", "samples", "of the true class"],
                [":---", ":---", "---:", "---:"],
                [*shown, "1", "25.00 %"],
            ]
        ]
        assert "```" not in markdown


def test_a_matrix_too_large_to_read_gives_way_to_its_confusions():
    """A matrix too large to read gives way to its confusions."""
    matrix = [[2 * (i == j) + (j == i + 1) for j in range(1000)] for i in range(1000)]
    markdown = confusion_table(evaluation([f"c{i}" for i in range(1000)], matrix))
    assert "1000 classes" in markdown
    assert len(markdown) < 2_000
    assert ["c0", "c1", "1", "33.33 %"] in tables(markdown)[0]


def test_an_evaluation_of_a_loss_alone_and_no_epochs_makes_a_report():
    """Without a model it says what to do."""
    found = Report(num_samples=1, loss=1.5, metrics={"perplexity": 4.5})
    record = RECORD.model_copy(update={"commit": None})
    markdown = page_of(record=record, train_report=report({}, evaluation=found, epochs=()))
    assert markdown.startswith("# digits: finished\n\nloss 1.5, perplexity 4.5, 1 samples\n")
    assert "Confusion" not in markdown
    assert "git commit" not in markdown
    assert "No model was exported: `train` tracked none." in markdown
    assert "load_state_dict" not in markdown


@pytest.mark.parametrize(
    ("num_epochs", "shown"), [(None, "20"), (1, "20 in 1 epoch"), (2, "20 in 2 epochs")]
)
def test_the_record_counts_its_epochs(num_epochs: int | None, shown: str) -> None:
    """One epoch is not `1 epochs`."""
    record = RECORD.model_copy(update={"num_steps": 20, "num_epochs": num_epochs})
    assert ["steps", shown] in tables(page_of(record=record).partition("## Run record")[2])[0]


def test_steps_without_epochs_are_said_to_have_none():
    """Nor do they have samples that anybody knows; their means are there."""
    rows = [EpochRow(epoch=0, num_steps=5000, num_samples=0, metrics={"loss": 0.5})]
    header, _rule, only = tables(epoch_table(rows))[0]
    assert dict(zip(header, only, strict=True)) == {
        "epoch": "none",
        "steps": "5,000",
        "samples": "",
        "loss": "0.5",
    }


def test_the_epoch_table_says_nan_and_of_many_shows_the_first_the_best_and_the_last():
    """What wasn't measured is blank; 20 are shown whole."""
    header, _rule, first, second = tables(epoch_table(report().epochs))[0]
    assert header == ["epoch", "steps", "samples", "loss", "validation_accuracy"]
    assert first == ["1", "40", "1,280", "0.1235", "0.5"]
    assert second == ["2", "40", "1,280", "nan", ""]
    rows = [
        report()
        .epochs[0]
        .model_copy(
            update={"epoch": epoch, "metrics": {"val_acc": 0.9 if epoch == 77 else math.nan}}
        )
        for epoch in range(1, 301)
    ]
    whole = epoch_table(rows[:20], ("val_acc", "max"))
    assert [row[0] for row in tables(whole)[0][2:]] == [str(epoch) for epoch in range(1, 21)]
    assert "left out" not in whole
    long = epoch_table(rows, ("val_acc", "max"))
    shown = [row[0] for row in tables(long)[0][2:]]
    assert shown == ["1", "77 (best)", *(str(epoch) for epoch in range(291, 301))]
    assert "288 epochs are left out: here are the first, the best and the last 10." in long
    assert "here are the first and the last 10." in epoch_table(rows)


def test_the_epoch_table_has_the_judged_metric_and_says_how_many_are_left_out():
    """Also if it was reported last; the table of metrics has them all."""
    names = [f"train_{i}" for i in range(7)]
    metrics = {**dict.fromkeys(names, 1.0), "val_acc": 0.5}
    rows = [EpochRow(epoch=1, num_steps=2, num_samples=4, metrics=metrics)]
    shown = epoch_table(rows, ("val_acc", "max"))
    header, _rule, only = tables(shown)[0]
    assert header == ["epoch", "steps", "samples", "val_acc", *names[:5]]
    assert only == ["1 (best)", "2", "4", "0.5", *["1"] * 5]
    assert shown.endswith("\n\n2 more metrics are left out: see Metrics.")
    few = EpochRow(epoch=1, num_steps=2, num_samples=4, metrics={"loss": 1.0, "val_acc": 0.5})
    whole = epoch_table([few], ("val_acc", "max"))
    assert tables(whole)[0][0][3:] == ["loss", "val_acc"]
    assert "left out" not in whole


def test_the_headline_tells_a_metric_from_the_fixed_score_of_its_name():
    """Both are shown, each once."""
    both = Report(num_samples=8, accuracy=0.75, metrics={"accuracy": 0.5, "loss": 2.0})
    page = page_of(train_report=report(evaluation=both))
    assert "accuracy 75.00 %, metric.accuracy 0.5, loss 2, 8 samples" in page


def test_all_scores_of_an_evaluation_are_on_the_page():
    """More than stand at its top are a table, next to those of the last run."""
    metrics = {f"top{i}": i / 10 for i in range(1, 6)}
    of_last = old_record(evaluation=evaluation(metrics={"top5": 0.25, "gone": 1.0}))
    page = page_of(train_report=report(evaluation=evaluation(metrics=metrics)), previous=of_last)
    assert "accuracy 87.50 %, loss 0.25, top1 0.1, top2 0.2, top3 0.3, 8 samples" in page
    header, _rule, *rows = tables(page.partition("## Evaluation")[2])[0]
    assert header == ["score", "value", "last run"]
    assert rows[:3] == [
        ["accuracy", "0.875", "0.875"],
        ["loss", "0.25", "0.25"],
        ["top1", "0.1", ""],
    ]
    assert rows[-1] == ["top5", "0.5", "0.25"]
    few = page_of(train_report=report(evaluation=evaluation(metrics={"top5": 0.5})))
    assert "## Evaluation" not in few
    many = page_of(
        train_report=report(evaluation=evaluation(metrics={f"m{i}": i for i in range(105)}))
    )
    assert "\n\n7 more scores are left out.\n" in many.partition("## Evaluation")[2]


def test_a_ledger_that_is_not_clean_is_said_first():
    """The report begins with it."""
    wrong = {"epoch": 1, "num_samples": 3, "num_total": 4, "is_finished": True}
    wrong |= {"num_missing": 1, "missing": (2,)}
    ledger = {"run_id": "r", "epochs": (wrong,), "attempts": {1: 2}}
    page = page_of(train_report=report(ledger=ledger))
    assert "**The ledger is not clean**" in page.split("## ")[0]
    assert page.count("- epoch 1: 3 samples; 1 missing (2)") == 2
    assert "of attempt 1 (2 ranks)." in page


@pytest.mark.parametrize("start", ["# h", "- x", "+ x", "1. x", "2) x", "===", "---", "#"])
def test_a_name_that_begins_like_markdown_stays_a_name(start: str) -> None:
    """No heading, list or rule begins with it; a negative number stays as it is."""
    assert text(start).startswith("\u2060")
    assert text("-0.5") == "-0.5"


def test_a_running_training_links_to_the_dashboard_of_its_cluster() -> None:
    """A page that has ended doesn't, and an address that is no web address isn't a link."""
    url = "http://10.0.0.1:8787/status"
    running = TrainingProgress(4)
    linked = page_of(running, dashboard=url)
    assert f"| Dask dashboard | [10.0.0.1:8787/status]({url}) |" in linked
    assert "Dask dashboard" not in page_of(TrainingProgress(4, status="failed"), dashboard=url)
    assert "Dask dashboard" not in page_of(running)
    tunnel = "ssh -N -L 8787:10.0.0.1:8787 you@login-node"
    from_afar = page_of(running, dashboard=url, dashboard_tunnel=tunnel)
    assert f"({url}); from another machine `{tunnel}`, then `http://localhost:8787/s" in from_afar
    odd = page_of(running, dashboard="javascript:alert(1)")
    assert "| Dask dashboard | `javascript:alert(1)` |" in odd
