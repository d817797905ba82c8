"""What `runs` and `show` print of a record."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_torch_ddp import list_runs
from prefect_torch_ddp.checkpoint.keys import manifest_key
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.cli.options import with_its_checkpoint
from prefect_torch_ddp.cli.runs import aligned, facts, metrics, row, runs, show
from prefect_torch_ddp.cli.sync import said
from prefect_torch_ddp.cli.train import resume
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.records.run_record import write_run_record
from prefect_torch_ddp.results import CheckpointRef, in_lines
from prefect_torch_ddp.server import ServerError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.report.page.links import Links
from prefect_torch_ddp.tasks.report.page.run_list import render_runs
from prefect_torch_ddp.tracking.trackers.sync import sync_run
from prefect_torch_ddp.tracking.trackers.tensorboard_tracker import TensorboardTracker
from tests.support.pages import BEGAN, LAST, MODEL, RECORD, RUN, evaluation

DONE = RECORD.model_copy(
    update={
        "state": "completed",
        "ended": BEGAN + timedelta(seconds=3725),
        "num_steps": 4200,
        "checkpoint": CheckpointRef(**LAST),
        "num_epochs": 10,
        "metrics": {"loss": 0.123456},
        "options": {"lr": 0.1},
        "evaluation": evaluation(),
        "model_uris": MODEL,
        "flow_run_id": "f0",
    }
)


def test_a_completed_run_is_shown_in_some_ten_lines() -> None:
    """Its state, score, what it took, model, report, and how to continue it."""
    lines = in_lines(facts(DONE, "s3://bucket/runs/r/report.html", "s3://bucket")).splitlines()
    began = f"{BEGAN.astimezone():%Y-%m-%d %H:%M}"
    assert lines == [
        f"run         {RUN}, completed",
        "score       accuracy 0.875, loss 0.25 on 8 samples",
        "trained     4,200 steps in 10 epochs on 2 ranks, 2 attempts",
        f"began       {began}, took 1 h 2 min",
        "workload    digits, commit abc123 with changes",
        "options     lr=0.1",
        "last        loss 0.1235",
        "model       s3://bucket/runs/r/model.pt",
        "report      s3://bucket/runs/r/report.html",
        "in Prefect  flow run f0",
        f"continue    prefect-torch-ddp resume {RUN} -o NAME=VALUE --storage s3://bucket",
    ]


def test_the_model_of_a_storage_that_was_moved_is_shown_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `show` and by `list_runs`; the record itself stays as it is."""
    old = DirectoryStorage(tmp_path / "old")
    there = {"model": f"{old.uri}/runs/{RUN}/models/000001/model.safetensors"}
    write_run_record(old, DONE.model_copy(update={"storage": old.uri, "model_uris": there}))
    (tmp_path / "old").rename(tmp_path / "new")
    moved = f"{tmp_path}/new/runs/{RUN}/models/000001/model.safetensors"
    show(RUN, str(tmp_path / "new"))
    assert f"model       {moved}\n" in capsys.readouterr().out
    assert list_runs(tmp_path / "new").model_uri.tolist() == [moved]


def test_a_failed_run_says_its_cause_first() -> None:
    """And is continued without another word."""
    changes = {"state": "failed", "cause": "ValueError: boom", "checkpoint": CheckpointRef(**LAST)}
    failed = RECORD.model_copy(update=changes)
    lines = in_lines(facts(failed, "", "~/prefect-torch-ddp")).splitlines()
    assert lines[:2] == [f"run         {RUN}, failed", "cause       ValueError: boom"]
    assert lines[-1] == f"continue    prefect-torch-ddp resume {RUN}"


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_run_that_ended_without_a_checkpoint_is_not_continued(state: str) -> None:
    """`resume` would refuse it. A killed one may have a checkpoint that isn't on record yet."""
    ended = RECORD.model_copy(update={"state": state, "ended": BEGAN})
    assert dict(facts(ended, "", "x"))["continue"] == ""
    assert dict(facts(RECORD, "", "x"))["if killed"].startswith("prefect-torch-ddp resume")


def test_a_resumed_run_that_saved_nothing_is_continued_where_it_began() -> None:
    """The run before still has its checkpoint."""
    changes = {"state": "failed", "ended": BEGAN, "parameters": {"resume_from": "old-1"}}
    ended = RECORD.model_copy(update=changes)
    assert dict(facts(ended, "", "~/prefect-torch-ddp"))["continue"].endswith(f" resume {RUN}")


@pytest.mark.parametrize("chosen", ["latest", "best", "flow-run:0199"])
def test_show_names_the_command_that_resume_carries_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chosen: str
) -> None:
    """`resume` was named, and refused, for a run that saved nothing and began by a choice.

    What the choice led to is on record. If it was the weights only, or nothing, there is nothing
    to continue. A checkpoint that isn't on record counts, and one that was deleted doesn't.
    """
    storage, named = DirectoryStorage(tmp_path), f"prefect-torch-ddp resume {RUN}"
    ended = {"state": "failed", "ended": BEGAN, "parameters": {"resume_from": chosen}}
    record = RECORD.model_copy(update=ended)
    deleted = record.model_copy(update={"checkpoint": CheckpointRef(**LAST)})
    of_choice = record.model_copy(update={"began_from": "old-1"})
    for each, origin in ((record, None), (deleted, None), (of_choice, "old-1")):
        write_run_record(storage, each)
        assert with_its_checkpoint(storage, each).continues_from == origin
        show(RUN, str(tmp_path))
        assert (named in capsys.readouterr().out) == (origin is not None)
    storage.write(manifest_key(RUN, 7, 1), Manifest(RUN, 7, 1, 1, {}, 2).as_bytes())
    assert with_its_checkpoint(storage, record).continues_from == RUN
    show(RUN, str(tmp_path))
    assert named in capsys.readouterr().out


def test_latest_is_the_newest_run_that_can_be_resumed_here(tmp_path: Path) -> None:
    """A task's run is passed over; it was chosen, and refused."""
    storage, latest = DirectoryStorage(tmp_path), {"began": BEGAN + timedelta(days=1)}
    of_flow = {"parameters": {"workload": "w", "storage": "s"}}
    write_run_record(storage, DONE.model_copy(update=of_flow))
    of_task = {"run_id": "fit-1", "dataset": None, "parameters": {}, **latest}
    write_run_record(storage, RECORD.model_copy(update=of_task))
    with pytest.raises(InvalidParamsError, match=f"run {RUN} is completed; say what more to do"):
        resume("latest", storage=str(tmp_path))


@pytest.mark.parametrize("changes", [{}, {"state": "failed", "is_tried_again": True}])
def test_a_run_that_still_trains_is_watched_and_not_resumed(changes: dict[str, object]) -> None:
    """`show` said "took ?", and named `resume`, which refuses a run that still trains.

    A run whose process was killed has the same record, so `show` says when to resume. A task that
    waits for its retry isn't over either.
    """
    now = datetime.now(UTC)
    began = now - timedelta(seconds=190)
    running = RECORD.model_copy(update={"began": began, "ended": now, **changes})
    shown = dict(facts(running, "", "s3://bucket"))
    where = f"{RUN} --storage s3://bucket"
    assert re.search(r", 3 min 1\d s ago$", shown["began"])
    assert "continue" not in shown
    assert shown["watch"] == f"prefect-torch-ddp metrics {where}"
    assert shown["if killed"] == f"prefect-torch-ddp resume {where}"
    assert dict(facts(running, "", "/my runs"))["watch"].endswith(" --storage '/my runs'")
    task = dict(facts(running.model_copy(update={"dataset": None}), "", "s3://bucket"))
    assert (task["watch"], task["if killed"]) == (shown["watch"], "")


def test_a_run_that_was_killed_in_its_evaluation_can_be_resumed(tmp_path: Path) -> None:
    """Its training has completed. `resume` asked what more to do, although it wasn't evaluated.

    Here the server that would be asked whether the run is evaluated now doesn't answer.
    """
    killed = DONE.model_copy(update={"evaluation": None})
    shown = dict(facts(killed, "", "x"))
    assert shown["if killed"] == f"prefect-torch-ddp resume {RUN} --storage x"
    assert "continue" not in shown
    storage = DirectoryStorage(tmp_path)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        for record, says in ((killed, "no Prefect server answers"), (DONE, "say what more to do")):
            write_run_record(storage, record)
            with pytest.raises((ServerError, InvalidParamsError), match=says):
                resume(RUN, storage=str(tmp_path))


def test_a_task_is_not_continued_from_here() -> None:
    """The record of a task doesn't have everything that a new call needs."""
    shown = dict(facts(DONE.model_copy(update={"dataset": None}), "", "x"))
    assert shown["continue"] == ""


def test_a_task_is_refused_before_a_server_is_started(tmp_path: Path) -> None:
    """Whether it has completed or not, `resume` can't know what to call again."""
    storage = DirectoryStorage(tmp_path)
    for state in ("completed", "failed"):
        write_run_record(storage, RECORD.model_copy(update={"dataset": None, "state": state}))
        with pytest.raises(InvalidParamsError, match=f"task again, with resume_from='{RUN}'"):
            resume(RUN, ["epochs=3"], storage=str(tmp_path))


def test_rows_stand_below_one_another() -> None:
    """A run that has only begun has empty values."""
    lines = aligned([("RUN", "STATE"), row(DONE)[:2], row(RECORD)[:2]])
    assert lines == [
        "RUN                  STATE",
        f"{RUN}  completed",
        f"{RUN}  training",
    ]
    assert row(RECORD)[3:7] == ("", "2", "", "")


@pytest.mark.parametrize(
    "changes",
    [
        {"evaluation": None, "metrics": {"loss": 2.5}},
        {"evaluation": None, "metrics": {"loss": 2.5}, "state": "failed"},
        {"evaluation": None, "best_metric": "val_loss", "best_value": 0.1234567},
        {},
    ],
)
def test_a_run_has_the_same_score_here_and_on_the_page_of_all_runs(
    changes: dict[str, object],
) -> None:
    """The page showed a failed run's last loss, and a completed one's that had no score here."""
    record = DONE.model_copy(update=changes)
    (line,) = (each for each in render_runs([record], Links()).splitlines() if RUN in each)
    assert row(record)[6] == line.split(" | ")[2].strip().replace("\\", "")


def test_a_misspelt_experiment_is_refused(tmp_path: Path) -> None:
    """`runs` said that the storage has no run, and ended well."""
    storage = DirectoryStorage(tmp_path)
    write_run_record(storage, RECORD)
    asked = RECORD.experiment[:-1]
    text = f"no experiment {asked}; did you mean {RECORD.experiment}.* .there are"
    with pytest.raises(InvalidParamsError, match=text):
        runs(str(tmp_path), experiment=asked, limit=20)


def test_a_run_without_metrics_is_said_to_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was an empty frame's words, pandas' own; a file of CSV has its header."""
    write_run_record(DirectoryStorage(tmp_path), DONE)
    metrics(RUN, str(tmp_path), csv=False, by="step", all_attempts=False)
    assert capsys.readouterr().out == "no metrics of this run are on record\n"
    metrics(RUN, str(tmp_path), csv=True, by="step", all_attempts=False)
    assert capsys.readouterr().out.startswith("step,")


def test_a_completed_run_without_metrics_has_nothing_to_wait_for(tmp_path: Path) -> None:
    """`sync` said that none of its steps is final yet."""
    storage = DirectoryStorage(tmp_path / "runs")
    write_run_record(storage, DONE)
    tracker = TensorboardTracker(tmp_path / "logs")
    text = f"TensorBoard got 0 values of run {RUN}; the run has no metrics"
    assert said(tracker, RUN, sync_run(storage, RUN, tracker)) == text
