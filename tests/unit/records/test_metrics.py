"""What is read back of metrics: means by hand, resumed attempts, damaged lines."""

import json
import logging
import math
import sys

import pandas as pd
import pytest

from prefect_torch_ddp import InvalidParamsError, read_goodput, read_ledger, read_metrics
from prefect_torch_ddp.records.growing import GrowingRecords
from prefect_torch_ddp.records.metrics import (
    BEFORE_START,
    MEASURED,
    epoch_rows,
    read_new_records,
    records_frame,
    surviving_records,
)
from prefect_torch_ddp.storage.formats import METRICS
from tests.support.formats import head
from tests.support.records import (
    Record,
    Shelf,
    columns,
    read_all_records,
    read_records,
    record,
    rows,
)

RUN = "calm-otter-12345678"
HEAD = head(METRICS)


def part(rank: int, number: int = 1) -> str:
    """Name the object of one part."""
    return f"runs/{RUN}/metrics/rank-{rank:05d}/000001-{number:06d}.jsonl"


def line(*args, **options) -> bytes:
    """Write one record as a rank does."""
    return json.dumps(vars(record(*args, **options))).encode() + b"\n"


def kept(*attempts: list[Record]) -> list[tuple[int, int, int]]:
    """Return step, rank and attempt of the records that survive."""
    records = surviving_records(columns(found for attempt in attempts for found in attempt))
    return [(found.step, found.rank, found.attempt) for found in rows(records)]


def test_an_attempt_that_was_killed_before_its_first_step_takes_no_step_back():
    """It resumed from step 2 and validated again. In a loop without steps, 2 is a checkpoint's."""
    before = [record(step, loss=1.0) for step in (1, 2, 3)]
    again = [record(2, attempt=2, num_samples=0, val_loss=7.0)]
    after = [record(3, attempt=3, loss=1.0)]
    assert kept(before, again) == [(1, 0, 1), (2, 0, 1), (2, 0, 2)]
    assert kept(before, again, after) == [(1, 0, 1), (2, 0, 1), (2, 0, 2), (3, 0, 3)]
    own_loop = [record(step, num_samples=0, reward=1.0) for step in (1, 2, 3)]
    assert kept(own_loop, again) == [(1, 0, 1), (2, 0, 2)]


def test_an_attempt_that_reports_nothing_at_first_takes_back_the_steps_that_it_repeats():
    """It resumed after step 410, and reports every 100 steps; step 430 is no longer what counts."""
    first = line(400, loss=1.0) + line(430, skipped=1.0)
    measured = vars(record(411, attempt=2)) | {"measured": {"learning_rate": 0.1}}
    again = json.dumps(measured).encode() + b"\n" + line(500, attempt=2, loss=0.5)
    again_key = f"runs/{RUN}/metrics/rank-00000/000002-000001.jsonl"
    shelf = Shelf({part(0): HEAD + first, again_key: HEAD + again})
    assert read_metrics(shelf, RUN)["step"].tolist() == [400, 500]
    assert read_metrics(shelf, RUN, all_attempts=True)["step"].tolist() == [400, 430, 500]
    counting = surviving_records(GrowingRecords(shelf, RUN).read())
    assert [(each.step, each.metrics) for each in rows(counting)] == [
        (400, {"loss": 1.0}),
        (500, {"loss": 0.5}),
    ]


def test_what_is_reported_before_the_place_is_known_takes_nothing_back():
    """In steps as in an own loop. That of the first attempt that went further counts."""
    early = [record(0, 0, attempt, num_samples=BEFORE_START, files=7) for attempt in (1, 2, 3)]
    for num in (4, 0):
        first = [early[0], *(record(step, num_samples=num, loss=1.0) for step in (1, 2, 3))]
        again = [record(3, attempt=3, num_samples=num, loss=1.0)]
        assert kept(first) == kept(first, early[1:]) == [(step, 0, 1) for step in range(4)]
        assert kept(first, early[1:], again) == [(0, 0, 1), (1, 0, 1), (2, 0, 1), (3, 0, 3)]
        assert kept(first[1:], early[1:], again)[0] == (0, 0, 3), "attempt 2 got no further"
        anew = [record(0, attempt=2, num_samples=0, loss=1.0)]
        assert (0, 0, 1) in kept(first, anew), "a new beginning doesn't lose it"
    assert kept([early[0]], [early[1]]) == [(0, 0, 2)]


def test_what_an_attempt_reported_that_ended_before_its_place_was_known_may_lack_some():
    """It may be killed between two reports: the first that went further made all of them."""
    for num in (4, 0):
        cut = [record(0, num_samples=BEFORE_START, files=7)]
        reports = {"files": 7}, {"parameters": 1e6}
        whole = [record(0, 0, 2, num_samples=BEFORE_START, **report) for report in reports]
        steps = [record(step, attempt=2, num_samples=num, loss=1.0) for step in (1, 2)]
        known = kept(cut, whole, steps)
        assert known == [(0, 0, 2), (0, 0, 2), (1, 0, 2), (2, 0, 2)]
        early = [record(0, 0, 3, num_samples=BEFORE_START, files=7)]
        later = [record(2, attempt=3, num_samples=num, loss=1.0)]
        assert kept(cut, whole, steps, early) == known, "a tracker would begin again"
        assert kept(cut, whole, steps, early, later) == [*known[:3], (2, 0, 3)]


def test_a_report_before_the_place_is_known_is_of_no_samples():
    """Also for a version that doesn't know the field that says so."""
    written = vars(record(0, num_samples=0, files=7)) | {"is_before_start": True}
    shelf = Shelf({part(0): HEAD + json.dumps(written).encode()})
    assert read_metrics(shelf, RUN)["num_samples"].tolist() == [0]
    assert read_new_records(shelf, RUN, set()).rows["num_samples"].tolist() == [BEFORE_START]


def test_all_parts_of_all_ranks_are_read_in_order_of_step():
    """No record of another run is read whose id begins in the same way."""
    objects = {part(0).replace(RUN, RUN + "-2"): HEAD + line(1)}
    for rank in range(2):
        for number in range(15):
            steps = range(number * 100 + 1, number * 100 + 101)
            lines = [line(step, rank, loss=step + rank / 10) for step in steps]
            objects[part(rank, number + 1)] = HEAD + b"".join(lines)
    records = read_records(Shelf(objects), RUN)
    every = [(step, rank) for step in range(1, 1501) for rank in range(2)]
    assert [(found.step, found.rank) for found in records] == every
    assert records[-1].metrics == {"loss": 1500.1}
    assert read_records(Shelf(), RUN) == []


def test_parts_that_are_known_are_not_read_again():
    """As the live report does."""
    known: set[str] = set()
    assert len(read_new_records(Shelf({part(0): HEAD + line(1)}), RUN, known)) == 1
    more = Shelf({part(0): b"not read", part(0, 2): HEAD + line(2)})
    assert read_new_records(more, RUN, known).rows["step"].tolist() == [2]


def test_what_ranks_measured_is_apart_from_what_was_reported():
    """No row, no column and no epoch of the user's has it; who asks for it gets it by its name."""
    lines = [vars(record(step, loss=1.0 / step)) for step in (1, 2)] + [vars(record(3))]
    measured = {"measured": {"learning_rate": 0.1, "loss": 9.0}}
    written = b"\n".join(json.dumps(each | measured).encode() for each in lines)
    shelf = Shelf({part(0): HEAD + written})
    reported = [(each.step, each.metrics) for each in rows(read_all_records(shelf, RUN))]
    assert reported == [(1, {"loss": 1.0}), (2, {"loss": 0.5})]
    measured = {MEASURED + "learning_rate": 0.1, MEASURED + "loss": 9.0}
    everything = [each.metrics for each in rows(read_new_records(shelf, RUN, set()))]
    assert everything == [{"loss": 1.0, **measured}, {"loss": 0.5, **measured}, measured]


def test_an_epoch_is_the_mean_over_all_samples_of_all_ranks():
    """Weighed by their numbers."""
    records = [
        record(1, 0, num_samples=3, loss=1.0),
        record(1, 1, num_samples=1, loss=2.0),
        record(2, 0, num_samples=4, loss=0.5),
        record(2, 1, num_samples=2, loss=4.0),
        record(3, 0, epoch=2, num_samples=2, loss=7.0),
    ]
    first, second = epoch_rows(columns(records))
    assert first.metrics["loss"] == pytest.approx((3 * 1.0 + 2.0 + 4 * 0.5 + 2 * 4.0) / 10)
    assert (first.epoch, first.num_steps, first.num_samples) == (1, 2, 10)
    assert (second.epoch, second.num_steps, second.num_samples) == (2, 1, 2)
    assert second.metrics == {"loss": 7.0}
    assert epoch_rows(columns([])) == ()


def test_records_without_samples_count_only_where_there_are_no_others():
    """Such as a learning rate. A sample in two records is one; held-out ones are none."""
    records = [
        record(1, num_samples=4, loss=1.0),
        record(1, num_samples=4, accuracy=0.5),
        record(1, num_samples=100, validation_accuracy=0.25),
        record(2, num_samples=0, loss=99.0, learning_rate=0.1),
        record(3, num_samples=0, learning_rate=0.3),
    ]
    (row,) = epoch_rows(columns(records))
    assert row.num_samples == 4
    expected = {"loss": 1.0, "accuracy": 0.5, "validation_accuracy": 0.25, "learning_rate": 0.2}
    assert row.metrics == pytest.approx(expected)


def test_a_validation_metric_counts_equally_on_each_rank():
    """Whatever the samples of the training step in which it was reported."""
    for tail in ((1, 0), (2, 1), (4, 4)):
        records = [record(1, rank, num_samples=tail[rank], val_loss=float(rank)) for rank in (0, 1)]
        (row,) = epoch_rows(columns(records))
        assert row.metrics == {"val_loss": 0.5}


def test_a_resumed_attempt_supersedes_all_that_follows_its_first_step():
    """On every rank, also steps that it hasn't reached, ranks that it has no more, and what an
    attempt between had made. What it reports before that step, such as the number of parameters,
    before or after the checkpoint was restored, supersedes nothing."""
    old = [record(step, rank, 1, loss=1.0) for step in range(1, 10) for rank in range(2)]
    before = [(step, rank, 1) for step in (1, 2, 3) for rank in range(2)]
    new = [record(step, rank, 2, loss=1.0) for step in range(4, 12) for rank in range(2)]
    assert kept(old, new) == before + [(found.step, found.rank, 2) for found in new]
    assert kept(old, [record(4, 0, 2, loss=1.0)]) == [*before, (4, 0, 2)]
    third = [record(step, 0, 3, loss=1.0) for step in range(2, 4)]
    assert kept(old, new, third) == [(1, 0, 1), (1, 1, 1), (2, 0, 3), (3, 0, 3)]
    samples = {0: 0, 3: 0, 4: 1}
    new = [record(step, 0, 2, num_samples=num, loss=1.0) for step, num in samples.items()]
    expected = [(0, 0, 2), (1, 0, 1), (2, 0, 1), (3, 0, 1), (3, 0, 2), (4, 0, 2)]
    assert kept(old[::2], new) == expected


def test_nan_and_inf_are_read_and_a_diverged_epoch_is_nan():
    """A plain sum of inf and -inf is nan, whereas fsum would raise."""
    losses = ["nan", "inf", "-inf", 1.0]
    lines = b"".join(line(step, loss=loss) for step, loss in enumerate(losses, start=1))
    shelf = Shelf({part(0): HEAD + lines})
    values = [found.metrics["loss"] for found in read_records(shelf, RUN)]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1.0]
    assert math.isnan(epoch_rows(read_all_records(shelf, RUN))[0].metrics["loss"])


@pytest.mark.parametrize(
    "damage",
    [
        line(2, loss=0.5)[:37],
        b'{"step": 2}\n',
        b"[]\n",
        b"\xff\xfe\n",
        b'{"metrics": "\xc3\n',
        line(2, loss="a lot"),
    ],
    ids=["cut in half", "fields missing", "no object", "no text", "cut in a letter", "no number"],
)
def test_a_damaged_line_is_left_out_with_a_warning(damage, caplog):
    """It names the object and the line; the others are read."""
    whole = HEAD + line(1, 1, loss=3.0)
    shelf = Shelf({part(0): HEAD + line(1, loss=1.0) + damage, part(1): whole})
    with caplog.at_level(logging.WARNING):
        records = read_records(shelf, RUN)
    assert [(found.step, found.rank) for found in records] == [(1, 0), (1, 1)]
    (warning,) = [entry.getMessage() for entry in caplog.records]
    assert part(0) in warning
    assert "line 3" in warning


def test_a_part_that_does_not_begin_with_its_format_is_left_out(caplog):
    """With a warning that names it: its lines may mean anything."""
    shelf = Shelf({part(0): line(1, loss=1.0), part(1): HEAD + line(1, 1, loss=3.0)})
    assert [found.rank for found in read_records(shelf, RUN)] == [1]
    assert f"{part(0)} doesn't begin with its format" in caplog.text


def test_a_frame_has_a_row_a_record_and_a_column_a_metric():
    """After the six columns that every record has."""
    lines = HEAD + line(1, loss=1.0) + line(2, loss=0.5, accuracy=0.75)
    shelf = Shelf({part(0): lines, part(1): HEAD + line(1, 1, loss="nan")})
    frame = records_frame(shelf, RUN)
    columns = ["step", "epoch", "rank", "attempt", "time", "num_samples", "loss", "accuracy"]
    assert list(frame.columns) == columns
    assert frame["step"].tolist() == [1, 1, 2]
    assert frame["loss"].mean() == pytest.approx(0.75)
    assert frame["accuracy"].isna().tolist() == [True, True, False]
    assert records_frame(Shelf(), RUN).empty


def test_a_metric_named_like_a_column_has_one_of_its_own():
    """Users report `time` and `epoch`; both are there."""
    frame = records_frame(Shelf({part(0): HEAD + line(1, loss=1.0, time=0.25)}), RUN)
    assert frame["metric.time"].tolist() == [0.25]
    assert list(frame.columns)[-2:] == ["loss", "metric.time"]


def test_times_are_timestamps():
    """In UTC, to be plotted and subtracted."""
    times = records_frame(Shelf({part(0): HEAD + line(90, loss=1.0)}), RUN)["time"]
    assert times.tolist() == [pd.Timestamp("1970-01-01 00:01:30", tz="UTC")]


def test_by_step_there_is_one_row_for_all_ranks():
    """Its metrics are means over the ranks by their samples, in validation equally; a metric that
    no rank reported there is missing, and one that is nan on a rank is nan."""
    first = [
        line(1, loss=1.0, num_samples=3),
        line(2, loss=2.0, num_samples=3, val_loss=1.0),
        line(3, loss="nan", num_samples=3),
    ]
    second = [
        line(1, 1, loss=5.0, num_samples=1),
        line(2, 1, loss=6.0, num_samples=1, val_loss=3.0),
        line(2, 1, num_samples=1, late=7.0),
        line(3, 1, loss=1.0, num_samples=1),
    ]
    shelf = Shelf({part(0): HEAD + b"".join(first), part(1): HEAD + b"".join(second)})
    frame = read_metrics(shelf, RUN, by="step")
    names = ["step", "epoch", "attempt", "time", "num_samples", "loss", "val_loss", "late"]
    assert list(frame.columns) == names
    assert frame["step"].tolist() == [1, 2, 3]
    assert frame["num_samples"].tolist() == [4, 4, 4]
    assert frame["loss"].tolist()[:2] == [2.0, 3.0]
    assert math.isnan(frame["loss"][2])
    assert frame["val_loss"].isna().tolist() == [True, False, True]
    assert (frame["val_loss"][1], frame["late"][1]) == (2.0, 7.0)
    assert records_frame(Shelf(), RUN, by_step=True).empty
    with pytest.raises(InvalidParamsError, match="by='rank'; give 'record' or 'step'"):
        read_metrics(shelf, RUN, by="rank")


def test_by_step_attempts_are_rows_of_their_own():
    """With all attempts a step that was done again has two rows, and else the newer one."""
    again = part(0).replace("000001-", "000002-")
    lines = [line(1, loss=1.0), line(2, loss=2.0)]
    shelf = Shelf({part(0): HEAD + b"".join(lines), again: HEAD + line(2, attempt=2, loss=3.0)})
    every = read_metrics(shelf, RUN, by="step", all_attempts=True)
    found = every[["attempt", "step", "loss"]].to_numpy().tolist()
    assert found == [[1, 1, 1], [1, 2, 2], [2, 2, 3]]
    assert read_metrics(shelf, RUN, by="step")["loss"].tolist() == [1.0, 3.0]


@pytest.mark.parametrize("read", [read_metrics, read_ledger, read_goodput])
def test_a_run_that_is_not_there_is_named(read):
    """With the place that was looked at; one that has no such records is no error."""
    shelf = Shelf({part(0): HEAD + line(1)})
    with pytest.raises(InvalidParamsError, match="s3://bucket/prefix holds no run 'nobody'"):
        read(shelf, "nobody")
    read(shelf, RUN)


def test_without_pandas_the_error_says_what_to_do(monkeypatch):
    """In the words of the public function."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidParamsError, match=r"read_metrics .* `pip install pandas`"):
        records_frame(Shelf(), RUN)
