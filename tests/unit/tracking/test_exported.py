"""A run's records as plain files, which hold what `read_metrics` has."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from prefect_torch_ddp import InvalidParamsError, export_records, read_metrics
from prefect_torch_ddp.tracking import exported
from tests.support.records import Shelf, record
from tests.support.reported import RUN, checkpoint, put, resume, say, steps_of


@pytest.fixture
def shelf() -> Shelf:
    """Make a run whose second attempt repeated steps."""
    shelf = Shelf()
    say(shelf)
    put(shelf, 1, *steps_of(1, 1, 10))
    checkpoint(shelf, 6)
    resume(shelf, 2, 6, 1)
    put(shelf, 2, *steps_of(2, 7, 12), record(12, 0, 2, time=2.5, odd="inf"))
    return shelf


def lines_of(folder: Path, rank: int) -> list[str]:
    """Return a rank's lines."""
    return (folder / f"rank-{rank:05d}.jsonl").read_text().splitlines()


def test_files_are_what_read_metrics_has(shelf: Shelf, tmp_path: Path) -> None:
    """The steps that count, to the last bit, in each format."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "rank-00002.jsonl").touch()  # of an earlier call, before the gang shrank
    export_records(shelf, RUN, out)
    names = ["metrics.csv", "metrics.parquet", "rank-00000.jsonl", "rank-00001.jsonl"]
    assert sorted(each.name for each in out.iterdir()) == names
    by_step = read_metrics(shelf, RUN, by="step")
    pd.testing.assert_frame_equal(pd.read_parquet(out / "metrics.parquet"), by_step)
    pd.testing.assert_frame_equal(
        pd.read_csv(out / "metrics.csv", parse_dates=["time"]),
        by_step.astype({"time": "datetime64[us, UTC]"}),
        check_dtype=False,
        check_exact=True,
    )
    rows = read_metrics(shelf, RUN)
    for rank in range(2):
        mine = rows[rows["rank"] == rank]
        found = [json.loads(line) for line in lines_of(out, rank)]
        assert [line["step"] for line in found] == list(mine.step)
        assert [line["attempt"] for line in found] == list(mine.attempt)
        assert [line["loss"] for line in found if "loss" in line] == list(mine.loss.dropna())
        assert [pd.Timestamp(line["time"]) for line in found] == list(mine.time)
    last = json.loads(lines_of(out, 0)[-1])
    assert (float(last["odd"]), last["metric.time"]) == (float("inf"), 2.5)


def test_a_folder_in_the_home_folder_is_found(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files went to a folder named `~` in the current one."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "now").mkdir()
    monkeypatch.chdir(tmp_path / "now")
    export_records(shelf, RUN, "~/out")
    assert (tmp_path / "home" / "out" / "metrics.csv").is_file()
    assert not list((tmp_path / "now").iterdir())


def test_only_files_of_ranks_are_deleted(shelf: Shelf, tmp_path: Path) -> None:
    """The user's own files whose names begin in the same way were deleted too."""
    mine = [
        "rank-notes.jsonl",
        "rank-2.jsonl",
        "rank-000002.jsonl",
        "rank-00002.jsonl.gz",
        "rank-00002-old.jsonl",
    ]
    for name in [*mine, "rank-00002.jsonl", "rank-100000.jsonl"]:
        (tmp_path / name).touch()
    export_records(shelf, RUN, tmp_path, formats=["json"])
    written = ["rank-00000.jsonl", "rank-00001.jsonl"]
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([*mine, *written])


def test_files_follow_a_run_that_trains(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written again when there are new records, until the run has completed."""
    seen = []

    def more() -> None:
        put(shelf, 3, *steps_of(3, 13, 14))

    def over() -> None:
        put(shelf, 4, *steps_of(4, 15, 15))
        say(shelf, "completed")

    events = iter([None, more, over])

    def sleep(_: float) -> None:
        seen.append(int(pd.read_csv(tmp_path / "metrics.csv").step.max()))
        (tmp_path / "metrics.csv").touch()
        if event := next(events):
            event()

    monkeypatch.setattr(exported.time, "sleep", sleep)
    export_records(shelf, RUN, tmp_path, follow=True, formats=["csv"])
    assert seen == [12, 12, 14]
    assert pd.read_csv(tmp_path / "metrics.csv").step.max() == 15
    assert next(events, None) is None


def test_a_failure_that_is_tried_again_is_no_end(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files follow a run whose task Prefect retries, until it has failed or was cancelled."""

    def begins() -> None:
        say(shelf)
        put(shelf, 3, *steps_of(3, 13, 14))

    states = iter(
        [
            lambda: say(shelf, "failed", is_tried_again=True),
            begins,
            lambda: say(shelf, "cancelled"),
        ]
    )
    monkeypatch.setattr(exported.time, "sleep", lambda _: next(states)())
    export_records(shelf, RUN, tmp_path, follow=True, formats=["csv"])
    assert next(states, None) is None
    assert pd.read_csv(tmp_path / "metrics.csv").step.max() == 14
    say(shelf, "failed")
    export_records(shelf, RUN, tmp_path, follow=True, formats=["csv"])


def test_a_run_that_is_silent_is_followed_for_as_long_as_was_asked(
    shelf: Shelf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its process may have been killed. Each new record starts the time again."""
    now = 0.0

    def sleep(_: float) -> None:
        nonlocal now
        now += 5.0
        if now == 10.0:
            put(shelf, 3, *steps_of(3, 13, 14))

    clock = SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    monkeypatch.setattr(exported, "time", clock)
    export_records(shelf, RUN, tmp_path, follow=True, idle_s=20.0, formats=["csv"])
    assert now == 30.0
    assert "no new record for 20 s" in caplog.text
    assert pd.read_csv(tmp_path / "metrics.csv").step.max() == 14
    for idle_s in (0, -1.0, float("nan")):
        with pytest.raises(InvalidParamsError, match="give a positive number of seconds"):
            export_records(shelf, RUN, tmp_path, follow=True, idle_s=idle_s)


def test_bad_input_is_refused_before_anything_is_written(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown run or format, or a package that isn't installed."""
    out = tmp_path / "out"
    with pytest.raises(InvalidParamsError, match="there is no record of run 'other'"):
        export_records(shelf, "other", out)
    for formats in (["xml"], "csv", []):
        with pytest.raises(InvalidParamsError, match="give a list of some of json, csv, parquet"):
            export_records(shelf, RUN, out, formats=formats)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidParamsError, match="extra `tables`"):
        export_records(shelf, RUN, out)
    assert not out.exists()
    export_records(shelf, RUN, out, formats=["json", "csv"])
