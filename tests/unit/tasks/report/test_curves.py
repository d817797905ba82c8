"""Curves from records: means over ranks, whatever the order, bounded in size."""

import math
import random

import pytest

from prefect_torch_ddp.records.metrics import BEFORE_START
from prefect_torch_ddp.tasks.report.curves import MAX_BINS, MetricCurves
from tests.support.records import columns, record


def test_a_step_is_the_mean_over_the_samples_of_all_ranks():
    """Records without samples count, equally, only if there are no others."""
    records = [
        record(1, 0, num_samples=1, loss=1.0),
        record(1, 1, num_samples=3, loss=5.0),
        record(1, 2, num_samples=0, loss=100.0),
        record(2, 0, loss=2.0, lr=0.1),
        record(3, 0, num_samples=0, accuracy=0.25),
        record(3, 1, num_samples=0, accuracy=0.75),
    ]
    expected = {"loss": [(1, 4.0), (2, 2.0)], "lr": [(2, 0.1)], "accuracy": [(3, 0.5)]}
    assert MetricCurves(columns(records)).snapshot().values == expected


def test_what_a_newer_attempt_repeats_or_takes_back_is_left_out_in_any_order_of_arrival():
    """One that begins again at step 4 voids all from there on; reports before it void nothing."""
    steps = [(step, rank) for step in range(1, 9) for rank in (0, 1)]
    records = [record(step, rank, epoch=1 + step // 4, loss=1.0) for step, rank in steps]
    records += [record(3, 0, 2, num_samples=0, parameters=7.0), record(4, 0, 2, epoch=2, loss=2.0)]
    random.Random(1).shuffle(records)
    curves = MetricCurves()
    for one in records:
        curves.add(columns([one]))
    found = curves.snapshot()
    loss = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]
    assert found.values == {"loss": loss, "parameters": [(3, 7.0)]}
    assert (found.epoch_ends, found.resumes) == ([3, 4], {2: 4})


def test_an_attempt_that_was_killed_before_its_first_step_takes_no_step_back():
    """Its validation after step 3, from which it resumed, voids only what follows that step."""
    records = [record(step, loss=1.0) for step in (1, 2, 3, 4, 5)]
    records.append(record(3, attempt=2, num_samples=0, val_loss=7.0))
    found = MetricCurves(columns(records)).snapshot()
    loss = [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert found.values == {"loss": loss, "val_loss": [(3, 7.0)]}
    assert found.resumes == {2: 4}


def test_a_report_before_the_place_is_known_voids_nothing_in_any_order_of_arrival():
    """Each attempt repeats it: that of the first that got further counts, and none voids others."""
    early = {
        attempt: record(0, 0, attempt, num_samples=BEFORE_START, files=attempt, loss=9.0)
        for attempt in (1, 2, 3)
    }
    records = [early[1], *(record(step, loss=1.0) for step in (1, 2, 3, 4)), early[2]]
    for more, loss, resumes in (
        ([], [(0, 9.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0)], {}),
        ([early[3], record(3, 0, 3, loss=2.0)], [(0, 9.0), (1, 1.0), (2, 1.0), (3, 2.0)], {3: 3}),
    ):
        records += more
        shuffled = random.Random(1).sample(records, len(records))
        curves = MetricCurves()
        for one in shuffled:
            curves.add(columns([one]))
        found = curves.snapshot()
        assert found.values == {"loss": loss, "files": [(0, 1.0)]}
        assert found.last["files"] == 1.0
        assert found.resumes == resumes


def test_an_attempt_that_was_killed_between_its_first_reports_hides_none_of_the_next_one():
    """While none has got further, the newest attempt's reports count."""
    cut = [record(0, num_samples=BEFORE_START, files=7)]
    whole = [
        record(0, 0, 2, num_samples=BEFORE_START, files=8),
        record(0, 0, 2, num_samples=BEFORE_START, parameters=1e6),
    ]
    steps = [record(step, attempt=2, loss=1.0) for step in (1, 2)]
    again = [record(0, 0, 3, num_samples=BEFORE_START, files=9)]
    for records, loss in ((cut + whole, {}), (cut + whole + steps + again, {"loss": 1.0})):
        found = MetricCurves(columns(records)).snapshot()
        assert found.last == {"files": 8.0, "parameters": 1e6} | loss
        assert found.values["parameters"] == [(0, 1e6)]


def test_a_training_that_never_knows_its_place_begins_again_with_its_first_report():
    """It tracks nothing: a newer attempt starts from the beginning."""
    records = [record(0, 0, attempt, num_samples=BEFORE_START, loss=attempt) for attempt in (1, 2)]
    found = MetricCurves(columns(records)).snapshot()
    assert (found.values, found.resumes) == ({"loss": [(0, 2.0)]}, {2: 0})


def test_a_long_training_shares_bins_and_keeps_its_mean_and_its_ends():
    """Ranks that are read one after the other fall into the same bins; nan hides no neighbour."""
    num_steps = 5 * MAX_BINS
    curves = MetricCurves()
    for rank in range(2):
        steps = range(1, num_steps + 1)
        curves.add(columns(record(step, rank, loss=float(step + rank)) for step in steps))
    curves.add(columns([record(9, 0, loss=math.nan)]))
    (curve,) = curves.snapshot().values.values()
    assert MAX_BINS / 2 <= len(curve) <= MAX_BINS
    assert [step for step, _ in curve] == sorted({step for step, _ in curve})
    assert all(value == pytest.approx(step + 0.5) for step, value in curve)
    assert curve[0][0] < 10
    assert curve[-1][0] > num_steps - 10


def test_nan_and_infinite_values_are_left_out_and_counted():
    """The curve continues after them, and superseded values aren't counted."""
    records = [record(1, loss=math.nan), record(2, loss=math.inf), record(3, loss=1.0)]
    found = MetricCurves(columns(records)).snapshot()
    assert (found.values, found.holes) == ({"loss": [(3, 1.0)]}, {"loss": 2})
    resumed = MetricCurves(columns([*records, record(2, attempt=2, loss=0.5)])).snapshot()
    assert (resumed.values, resumed.holes) == ({"loss": [(2, 0.5)]}, {"loss": 1})
    many = MetricCurves(columns(record(step, loss=math.nan) for step in range(3 * MAX_BINS)))
    assert many.snapshot().holes == {"loss": 3 * MAX_BINS}


def test_the_last_value_is_the_mean_over_the_ranks_at_the_last_step():
    """Exact though steps share a bin, in any order of arrival, nan if one of them is."""
    num_steps = 3 * MAX_BINS
    curves = MetricCurves()
    for rank in range(2):
        steps = range(1, num_steps + 1)
        curves.add(columns(record(step, rank, num_samples=1, loss=step + rank) for step in steps))
    curves.add(columns([record(5, 0, num_samples=0, val_acc=0.25)]))
    curves.add(columns([record(5, 1, num_samples=3, val_acc=0.75)]))
    assert curves.snapshot().last == {"loss": num_steps + 0.5, "val_acc": 0.5}
    curves.add(columns([record(num_steps + 1, 0, loss=1.0)]))
    curves.add(columns([record(num_steps + 1, 1, loss=math.nan)]))
    assert math.isnan(curves.snapshot().last["loss"])


def test_the_last_value_that_a_newer_attempt_took_back_gives_way():
    """The curve's last point takes its place until the newer attempt reports the metric."""
    old = [record(step, 0, 1, loss=float(step), val_loss=10.0 * step) for step in range(1, 9)]
    curves = MetricCurves(columns([*old, record(4, 0, 2, loss=0.5)]))
    assert curves.snapshot().last == {"loss": 0.5, "val_loss": 30.0}


def test_an_epoch_is_read_once_all_ranks_records_of_it_are():
    """A part that ends within the epoch doesn't end it, on whichever rank."""
    curves = MetricCurves()
    reached = []
    for part in (
        [record(step, 0, epoch=1, loss=1.0) for step in (1, 2, 3)],
        [record(4, 0, epoch=1, loss=1.0), record(5, 0, epoch=2, loss=1.0)],
        [record(step, 1, epoch=1, loss=1.0) for step in (1, 2)],
        [record(step, 1, epoch=1, loss=1.0) for step in (3, 4)],
        [record(step, 0, epoch=2, loss=1.0) for step in (6, 7, 8)],
        [record(5, 0, 2, epoch=2, loss=1.0), record(9, 0, 2, epoch=3, loss=1.0)],
    ):
        curves.add(columns(part))
        found = curves.snapshot()
        reached.append((found.attempt, found.read_epoch))
    assert reached[0] == (1, 0)
    assert reached[2:] == [(1, 0), (1, 1), (1, 1), (2, 2)]


def test_a_rank_that_seldom_reports_is_not_waited_for():
    """One that reported at the start only holds no epoch back."""
    records = [record(1, 1, loss=1.0)]
    records += [record(step, 0, epoch=1 + step // 100, loss=1.0) for step in range(1, 301)]
    found = MetricCurves(columns(records)).snapshot()
    assert (found.attempt, found.read_epoch) == (1, 3)
