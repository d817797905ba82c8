"""Timing records: the goodput of attempts that failed and resumed."""

from dataclasses import replace
from pathlib import Path

import pytest

from prefect_torch_ddp import Goodput
from prefect_torch_ddp.records.log import RecordLog
from prefect_torch_ddp.records.timing import (
    UNKNOWN_STEP,
    TimingLine,
    goodput,
    hours,
    newest_lines,
    read_goodput,
)
from prefect_torch_ddp.storage.directory import DirectoryStorage

PARTS = [name for name in Goodput.model_fields if name.endswith("_s") and name != "wall_s"]


def line(attempt: int, done: int, at: float, rank: int = 0, **seconds: float) -> TimingLine:
    """Make a record; without steps unless it has spent time in them."""
    steps = round(seconds.get("step", 0.0))
    return TimingLine(rank, attempt, "a", "cpu", done, at, 8 * steps, steps, 0, 10**8, 0, seconds)


def test_what_a_restart_took_back_is_lost_and_all_adds_up() -> None:
    """Attempt 1 saves at step 10 and is killed in step 15; 2 ends while it starts; 3 resumes."""
    lines = [
        line(1, 0, 105.0, starting=3.0),
        line(1, 10, 116.0, starting=3.0, step=10.0, loading=1.0),
        line(1, 14, 121.0, starting=3.0, step=14.0, loading=2.0),
        line(2, UNKNOWN_STEP, 134.0, starting=2.0),
        line(3, 10, 146.0, starting=4.0, restoring=1.0),
        line(3, 20, 160.0, starting=4.0, restoring=1.0, step=12.0, loading=1.0, setup=1.0),
    ]
    found = goodput("run", lines, {1: 100.0, 2: 130.0, 3: 140.0}, {1: 123.0, 2: 135.0})
    assert found == Goodput(
        run_id="run",
        num_attempts=3,
        wall_s=60.0,
        steps_s=22.0,
        data_s=2.0,
        redone_s=123.0 - 116.0,
        starting_s=3.0 + 2.0 + 1.0 + 4.0,
        restoring_s=1.0,
        queueing_s=2.0 + 7.0 + 2.0 + 5.0 + 1.0,
        other_s=1.0,
    )
    assert sum(getattr(found, name) for name in PARTS) == pytest.approx(found.wall_s)
    assert found.share == pytest.approx(22 / 60)


def test_validation_is_what_the_last_step_of_an_epoch_takes_beyond_a_step() -> None:
    """Nine steps of a second and one of four have 3 s of validation; only last steps have none."""
    last = replace(line(1, 10, 30.0, step=9.0, epoch_end=4.0), num_steps=10, num_epoch_ends=1)
    found = goodput("run", [last], {1: 17.0}, {})
    assert (found.validation_s, found.steps_s, found.wall_s) == (3.0, 10.0, 13.0)
    only = replace(last, num_steps=1)
    assert goodput("run", [only], {1: 17.0}, {}).validation_s == 0.0


def test_nothing_is_negative_or_beyond_the_wall_time() -> None:
    """An attempt without a record was starting; an older process counts from the claim."""
    assert goodput("run", [], {}, {}).wall_s == 0.0
    assert goodput("run", [], {1: 5.0}, {1: 9.0}).starting_s == 4.0
    found = goodput("run", [line(1, 3, 20.0, starting=15.0, step=3.0)], {1: 10.0}, {})
    assert (found.wall_s, found.starting_s, found.queueing_s) == (10.0, 7.0, 0.0)


def test_the_newest_record_of_each_rank_of_the_newest_attempt_is_read(tmp_path: Path) -> None:
    """Also from a host whose name looks like a value that JSON lacks."""
    storage = DirectoryStorage(tmp_path)
    for attempt, rank, step in ((1, 0, 9), (1, 1, 9), (2, 1, 4), (2, 0, 4)):
        log = RecordLog(storage, "run", "timing", rank=rank, attempt=attempt)
        for at in (step - 1, step):
            log.append(replace(line(attempt, at, float(at), rank, step=at), host="null"))
            log.flush()
        log.close()
    found = [(one.rank, one.attempt, one.step) for one in newest_lines(storage, "run")]
    assert found == [(0, 2, 4), (1, 2, 4)]


def test_hours_count_a_processor_and_a_gpu_of_several_ranks_once() -> None:
    """Ranks 0 and 1 share a GPU and their host's processors for half an hour; rank 2 is alone."""
    half, quarter = line(1, 1, 5000.0, step=1800.0), line(2, 1, 5000.0, step=900.0)
    first = [
        replace(half, rank=0, host="a", cpus="3", gpu="GPU-1"),
        replace(half, rank=1, host="a", cpus="3", gpu="GPU-1"),
        replace(half, rank=2, host="b", cpus="c0", gpu="GPU-2"),
    ]
    second = [replace(quarter, rank=0, cpus="1"), replace(quarter, rank=1, cpus="2")]
    assert hours([first, second]) == {"core_hours": 2.0 + 0.5, "gpu_hours": 1.0}
    assert hours([]) == {"core_hours": 0.0, "gpu_hours": 0.0}


def test_records_of_ranks_that_knew_no_processors_have_no_hours(tmp_path: Path) -> None:
    """Lines of an earlier version lack the field; what is no mask is a damaged line."""
    storage = DirectoryStorage(tmp_path)
    for rank, cpus in enumerate(("", "zz", "f")):
        log = RecordLog(storage, "run", "timing", rank=rank, attempt=1)
        log.append(replace(line(1, 1, 3700.0, rank, step=3600.0), cpus=cpus))
        log.close()
        found = read_goodput(storage, "run", {1: 100.0}, {})
        assert found.core_hours == (4.0 if cpus == "f" else 0.0)
        assert found.wall_s == 3600.0
