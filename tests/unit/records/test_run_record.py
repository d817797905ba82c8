"""Run records: what is written is read back, one listing finds all, and damage costs one row."""

import json
import logging
import math
import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import DirectoryStorage, InvalidParamsError, compare_runs, list_runs
from prefect_torch_ddp.errors import NewerFormatError
from prefect_torch_ddp.records.run_record import (
    AttemptRecord,
    RunRecord,
    find_run_record,
    list_run_records,
    previous_run,
    read_run_record,
    write_run_record,
)
from prefect_torch_ddp.results import DatasetReport, Report
from prefect_torch_ddp.tracking.description import values_for_record
from tests.support.formats import NEWER, rewrite

BEGAN = datetime(2026, 11, 22, 2, tzinfo=UTC)
NIGHTLY = "train-ddp/nightly/digits"


@pytest.fixture
def storage(tmp_path: Path) -> DirectoryStorage:
    """Give a storage of records."""
    return DirectoryStorage(tmp_path)


def record(night: int, experiment: str = NIGHTLY, **changes: object) -> RunRecord:
    """Make the record of the run of a night."""
    plain = {"run_id": f"run-{night}", "experiment": experiment, "workload": "digits"}
    fields = {"state": "completed", "began": BEGAN + timedelta(days=night), "storage": "/store"}
    return RunRecord.model_validate({**plain, **fields, **changes})


def test_a_record_is_read_back_whatever_its_numbers_are(storage):
    """Also numbers that JSON lacks, in models within it; what is written is strict JSON."""
    attempt = {"attempt": 1, "world_size": 2, "began": BEGAN, "hosts": ("a", "b")}
    report = Report(num_samples=3, metrics={"mae": math.inf})
    wrote = record(1, attempts=(attempt,), evaluation=report, metrics={"loss": math.nan})
    write_run_record(storage, wrote)
    json.loads(storage.read(wrote.key), parse_constant=pytest.fail)
    read = read_run_record(storage, "run-1")
    assert math.isnan(read.metrics["loss"])
    assert read.model_copy(update={"metrics": {}}) == wrote.model_copy(update={"metrics": {}})


def test_a_later_write_of_a_run_replaces_the_one_before(storage):
    """A run has one record, from its begin on."""
    write_run_record(storage, record(1, state="training"))
    write_run_record(storage, record(1, ended=BEGAN + timedelta(days=1, seconds=90)))
    (only,) = list_run_records(storage)
    assert (only.state, only.duration_s) == ("completed", 90)


def test_a_damaged_record_is_left_out_and_named(storage, caplog):
    """The others are read, and a request for the damaged one is an error."""
    for night in range(4):
        write_run_record(storage, record(night))
    storage.write(record(1).key, storage.read(record(1).key)[:-40])
    storage.write(record(2).key, b"[]")
    with caplog.at_level(logging.WARNING):
        assert [each.run_id for each in list_run_records(storage)] == ["run-3", "run-0"]
    assert record(1).key in caplog.text
    assert record(2).key in caplog.text
    with pytest.raises(InvalidParamsError, match=r"run run-1 is damaged"):
        read_run_record(storage, "run-1")
    with pytest.raises(InvalidParamsError, match=r"no record of run 'run-9'.*4 records"):
        read_run_record(storage, "run-9")


def test_what_a_later_version_added_is_kept(storage):
    """At any depth; an older version may put an evaluation on record, or try the training again."""
    attempts = tuple(AttemptRecord(attempt=n, world_size=2, began=BEGAN) for n in (1, 2))
    write_run_record(storage, record(1, attempts=attempts, evaluation=Report(num_samples=3)))
    values = json.loads(storage.read(record(1).key))
    values["attempts"][1]["weather"] = "fine"
    values["evaluation"]["judge"] = "a person"
    rewrite(storage, record(1).key, {**values, "later": [1]})
    (read,) = list_run_records(storage)
    assert read.attempts == attempts
    write_run_record(storage, read.model_copy(update={"evaluation": None, "num_steps": 7}))
    written = json.loads(storage.read(read.key))
    assert [each.get("weather") for each in written["attempts"]] == [None, "fine"]
    assert (written["later"], written["num_steps"], written["evaluation"]) == ([1], 7, None)


def test_what_a_later_version_added_to_a_replaced_object_goes_with_it(storage):
    """It was said of the old checkpoint; an attempt that ends is the same one."""
    checkpoint = {"uri": "/store/1", "step": 1, "attempt": 1}
    attempt = {"attempt": 1, "world_size": 2, "began": BEGAN}
    first = record(1, checkpoint=checkpoint, attempts=(attempt,))
    write_run_record(storage, first)
    values = json.loads(storage.read(first.key))
    values["checkpoint"]["later"] = values["attempts"][0]["later"] = values["later"] = 1
    storage.write(first.key, json.dumps(values).encode())
    read = read_run_record(storage, "run-1")
    ended = AttemptRecord(**attempt, cause="rank 1 failed")
    newest = {**checkpoint, "uri": "/store/2", "step": 2}
    for changes, is_kept in (({}, True), ({"checkpoint": newest}, False)):
        after = record(1, **{"checkpoint": checkpoint, "attempts": (ended,), **changes})
        after.keep(read.unknown)
        write_run_record(storage, after)
        written = json.loads(storage.read(first.key))
        assert written["later"] == written["attempts"][0]["later"] == 1
        assert ("later" in written["checkpoint"]) is is_kept


def test_a_newer_format_is_refused_by_name(storage):
    """Every reader of records refuses it, since it may be the run that is looked for."""
    write_run_record(storage, record(1))
    write_run_record(storage, record(2))
    rewrite(storage, record(1).key, NEWER)
    for read in (
        lambda: list_run_records(storage),
        lambda: read_run_record(storage, "run-1"),
        lambda: find_run_record(storage, "run-1", record(1).experiment),
        lambda: previous_run(storage, record(3)) and previous_run(storage, record(2)),
    ):
        with pytest.raises(NewerFormatError, match=rf"{record(1).key} is a run record of format 7"):
            read()
    assert read_run_record(storage, "run-2") == record(2)


def test_the_previous_run_is_the_newest_completed_one_of_the_experiment(storage):
    """Neither a failed one, nor a later one, nor one of an experiment of a similar name."""
    for night, state in enumerate(("completed", "completed", "failed", "training", "completed")):
        write_run_record(storage, record(night, state=state))
    like = record(2, "train-ddp nightly digits", run_id="other")
    assert like.key.rpartition("/")[0] == record(2).key.rpartition("/")[0]
    write_run_record(storage, like)
    assert previous_run(storage, record(3)) == record(1)
    assert previous_run(storage, record(3, weights_from="run-0")) == record(0)
    assert previous_run(storage, record(0)) is None
    assert previous_run(storage, record(9, "another")) is None


def test_runs_are_listed_a_row_each(storage):
    """Newest first, with what a person compares; of one experiment if asked; also none at all."""
    report = Report(num_samples=9, accuracy=0.75, metrics={"auc": 0.5})
    write_run_record(
        storage, record(1, evaluation=report, ended=BEGAN + timedelta(days=1, seconds=9))
    )
    write_run_record(storage, record(2, state="failed", cause="ValueError: boom", commit="abc"))
    write_run_record(storage, record(3, "other", state="training", metrics={"loss": 0.5}))
    runs = list_runs(storage)
    assert list(runs["run_id"]) == ["run-3", "run-2", "run-1"]
    assert list(runs["state"]) == ["training", "failed", "completed"]
    first = runs.set_index("run_id").loc["run-1"]
    assert (first["accuracy"], first["auc"], first["duration_s"]) == (0.75, 0.5, 9)
    assert (runs["commit"][1], runs["cause"][1]) == ("abc", "ValueError: boom")
    assert runs["train.loss"][0] == 0.5
    assert list(list_runs(storage.uri, "other")["run_id"]) == ["run-3"]
    empty = list_runs(Path(storage.uri) / "new")
    assert (len(empty), [*empty]) == (0, [*list_runs(storage, "other").drop(columns="train.loss")])


def test_two_runs_are_compared_by_what_differs_and_by_their_results(storage):
    """What is equal isn't shown, but for results; who has what the other lacks is seen."""
    data = DatasetReport(dataset_id="d", uri="/d", num_files=1, num_bytes=1, digest="one")
    alike = {"seed": 5, "versions": {"torch": "2.14", "numpy": "2"}, "parameters": {"retries": 2}}
    policy = {"checkpoint": {"every_steps": 5, "keep_last": 2}}
    write_run_record(storage, record(1, dataset=data, options={"lr": 0.1}, **alike))
    changed = {
        "dataset": data.model_copy(update={"digest": "two"}),
        "versions": {**alike["versions"], "torch": "2.15"},
        "parameters": {"retries": 2, **policy},
        "evaluation": Report(num_samples=9, accuracy=0.5),
    }
    write_run_record(storage, record(2, **{**alike, **changed}))
    table = compare_runs(storage, "run-1", "run-2")
    assert list(table.columns) == ["run-1", "run-2"]
    rows = {name: tuple(row) for name, row in zip(table.index, table.to_numpy(), strict=True)}
    assert {name: row for name, row in rows.items() if name[0] != "results"} == {
        ("data", "digest"): ("one", "two"),
        ("versions", "torch"): ("2.14", "2.15"),
        ("options", "lr"): (0.1, None),
        ("parameters", "checkpoint.every_steps"): (None, 5),
        ("parameters", "checkpoint.keep_last"): (None, 2),
    }
    assert rows["results", "state"] == ("completed", "completed")
    assert rows["results", "accuracy"] == (None, 0.5)
    with pytest.raises(InvalidParamsError, match="twice"):
        compare_runs(storage, "run-1", "run-1")


def test_two_runs_differ_by_floats_that_json_lacks(storage: DirectoryStorage) -> None:
    """All of them were the same nothing; a NaN is no difference to a NaN."""
    given = {"clip": math.inf, "fill": math.nan, "text": "NaN"}
    for night, changes in enumerate(({}, {"clip": -math.inf, "text": math.nan})):
        write_run_record(storage, record(night, options=values_for_record({**given, **changes})))
    assert read_run_record(storage, "run-0").options["clip"] == math.inf
    table = compare_runs(storage, "run-0", "run-1").loc["options"]
    assert table.to_dict("index") == {
        "clip": {"run-0": "Infinity", "run-1": "-Infinity"},
        "text": {"run-0": "(text) NaN", "run-1": "NaN"},
    }


def test_two_runs_differ_by_values_too_long_to_be_kept(storage: DirectoryStorage) -> None:
    """A short digest tells them apart, and is the same for equal ones, also of sets."""
    long, ordered = list(range(2_000)), [f"class_{each}" for each in range(500)]
    given: dict[str, Any] = {"same": long, "rows": long, "text": "a" * 3_000, "sets": set(ordered)}
    changed = {"rows": [*long[:-1], 7], "text": "b" * 3_000, "sets": {*ordered[250:], *ordered}}
    for night, values in enumerate((given, {**given, **changed})):
        write_run_record(storage, record(night, options=values_for_record(values)))
    table = compare_runs(storage, "run-0", "run-1").loc["options"]
    assert list(table.index) == ["rows", "text"]
    assert re.fullmatch(r"\(not on record: list of 2000, [0-9a-f]{8}\)", table["run-0"]["rows"])


class Encoder:
    """A value that JSON lacks."""

    def __init__(self, width: int) -> None:
        self.width = width


def test_two_runs_differ_by_objects_that_are_no_plain_values(storage: DirectoryStorage) -> None:
    """A digest of their content tells them apart, also within others; what can't be pickled has
    none, and what is named like a secret is hidden."""
    same, lock = Encoder(3), threading.Lock()
    given: dict[str, Any] = {"same": same, "net": Encoder(1), "nets": [Encoder(1)], "lock": lock}
    given["api_token"] = Encoder(1)
    changed = {"same": Encoder(3), "net": Encoder(2), "nets": [Encoder(2)], "lock": lock}
    for night, values in enumerate((given, {**given, **changed, "api_token": Encoder(2)})):
        write_run_record(storage, record(night, options=values_for_record(values)))
    table = compare_runs(storage, "run-0", "run-1").loc["options"]
    assert list(table.index) == ["net", "nets"]
    assert re.fullmatch(r"\(not on record: Encoder, [0-9a-f]{8}\)", table["run-0"]["net"])
    kept = read_run_record(storage, "run-0").options
    assert kept["lock"] == "(not on record: lock)"
    assert kept["api_token"] == values_for_record({"api_token": "x"})["api_token"]


def test_a_metric_of_an_evaluation_takes_no_column(storage: DirectoryStorage) -> None:
    """One that is named like a column of the run is beside it."""
    scores = {"steps": 7.0, "state": 1.0, "mae": 0.5}
    report = Report(num_samples=3, accuracy=0.75, metrics=scores)
    write_run_record(storage, record(1, evaluation=report, num_steps=100))
    (row,) = list_runs(storage).to_dict("records")
    assert (row["run_id"], row["state"], row["steps"]) == ("run-1", "completed", 100)
    assert (row["metric.steps"], row["metric.state"], row["mae"]) == (7.0, 1.0, 0.5)
