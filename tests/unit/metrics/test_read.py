"""What is read back of metrics: means by hand, resumed attempts, damaged lines."""

import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from prefect_torch_ddp.records.metrics import (
    Record,
    epoch_rows,
    lost_time_s,
    read_all_records,
    read_records,
    records_frame,
    surviving_records,
)
from prefect_torch_ddp.storage.protocol import StoredObject

RUN = "calm-otter-12345678"


@dataclass(frozen=True)
class Shelf:
    """A storage in memory, as far as reading goes."""

    objects: dict[str, bytes] = field(default_factory=dict)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield what is there, in key order."""
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield StoredObject(key, len(self.objects[key]))

    def read(self, key: str) -> bytes:
        """Return the whole object."""
        return self.objects[key]


def part(rank: int, attempt: int = 1, number: int = 1) -> str:
    """Name the object of one part."""
    return f"runs/{RUN}/metrics/rank-{rank:05d}/{attempt:06d}-{number:06d}.jsonl"


def line(
    step: int,
    rank: int = 0,
    attempt: int = 1,
    *,
    epoch: int = 1,
    num_samples: int = 1,
    time: float = 0.0,
    **metrics,
) -> bytes:
    """Write one record as a rank does."""
    record = {
        "step": step,
        "epoch": epoch,
        "rank": rank,
        "attempt": attempt,
        "time": time,
        "num_samples": num_samples,
    }
    return json.dumps(record | {"metrics": metrics}).encode() + b"\n"


def record(
    step: int,
    rank: int = 0,
    attempt: int = 1,
    *,
    epoch: int = 1,
    num_samples: int = 1,
    time: float = 0.0,
    **metrics,
) -> Record:
    """Make one record."""
    return Record(step, epoch, rank, attempt, time, num_samples, metrics)


def test_two_ranks_of_1500_steps_are_read_whole_from_many_parts_in_order_of_step():
    """Two ranks of 1500 steps are read whole from many parts in order of step."""
    objects = {}
    for rank in range(2):
        for number in range(15):
            steps = range(number * 100 + 1, number * 100 + 101)
            objects[part(rank, number=number + 1)] = b"".join(
                line(step, rank, loss=step + rank / 10) for step in steps
            )
    records = read_records(Shelf(objects), RUN)
    assert len(records) == 3000
    assert [(found.step, found.rank) for found in records] == [
        (step, rank) for step in range(1, 1501) for rank in range(2)
    ]
    assert records[-1].metrics == {"loss": 1500.1}


def test_a_run_without_records_has_none():
    """A run without records has none."""
    assert read_records(Shelf(), RUN) == []
    assert epoch_rows([]) == ()


def test_other_runs_whose_id_begins_alike_are_not_read():
    """Other runs whose id begins alike are not read."""
    other = part(0).replace(RUN, RUN + "-2")
    assert [
        found.step for found in read_records(Shelf({part(0): line(1), other: line(2)}), RUN)
    ] == [1]


def test_an_epoch_is_the_mean_over_all_samples_of_all_ranks():
    """An epoch is the mean over all samples of all ranks."""
    records = [
        record(1, 0, num_samples=3, loss=1.0),
        record(1, 1, num_samples=1, loss=2.0),
        record(2, 0, num_samples=4, loss=0.5),
        record(2, 1, num_samples=2, loss=4.0),
        record(3, 0, epoch=2, num_samples=2, loss=7.0),
    ]
    first, second = epoch_rows(records)
    assert first.metrics["loss"] == pytest.approx(
        (3 * 1.0 + 1 * 2.0 + 4 * 0.5 + 2 * 4.0) / 10, abs=1e-12
    )
    assert (first.epoch, first.num_steps, first.num_samples) == (1, 2, 10)
    assert (second.epoch, second.num_steps, second.num_samples, second.metrics) == (
        2,
        1,
        2,
        {"loss": 7.0},
    )


def test_records_of_no_samples_count_only_where_there_are_no_others():
    """Records of no samples count only where there are no others."""
    records = [
        record(1, num_samples=4, loss=1.0),
        record(2, num_samples=0, loss=99.0, learning_rate=0.1),
        record(3, num_samples=0, learning_rate=0.3),
    ]
    (row,) = epoch_rows(records)
    assert row.metrics == pytest.approx({"loss": 1.0, "learning_rate": 0.2})


def test_a_sample_reported_in_two_records_is_one_sample_and_held_out_samples_are_not_training_samples():
    """A sample reported in two records is one sample and held out samples are not training
    samples."""
    records = [
        record(1, num_samples=4, loss=1.0),
        record(1, num_samples=4, accuracy=0.5),
        record(1, num_samples=100, validation_accuracy=0.25),
    ]
    (row,) = epoch_rows(records)
    assert row.num_samples == 4
    assert row.metrics == {"loss": 1.0, "accuracy": 0.5, "validation_accuracy": 0.25}


def test_the_attempt_that_repeats_steps_wins_on_every_rank():
    """The attempt that repeats steps wins on every rank."""
    old = [record(step, rank, 1, loss=1.0) for step in range(1, 6) for rank in range(2)]
    new = [record(step, rank, 2, loss=2.0) for step in range(4, 8) for rank in range(2)]
    survivors = surviving_records(old + new)
    assert [(found.step, found.rank, found.attempt) for found in survivors] == [
        (step, rank, 1 if step < 4 else 2) for step in range(1, 8) for rank in range(2)
    ]
    values = [found.metrics["loss"] for found in survivors if found.rank == 0]
    assert values == [1.0] * 3 + [2.0] * 4


def test_what_a_resumed_attempt_reports_before_its_first_step_takes_nothing_back():
    """The number of parameters, for instance, reported before or after the checkpoint was
    restored."""
    old = [record(step, 0, 1) for step in range(1, 6)]
    new = [record(step, 0, 2, num_samples=number) for step, number in ((0, 0), (3, 0), (4, 1))]
    found = [(found.step, found.attempt) for found in surviving_records(old + new)]
    assert found == [(0, 2), (1, 1), (2, 1), (3, 1), (3, 2), (4, 2)]


def test_steps_that_the_resumed_attempt_has_not_reached_again_are_void_too():
    """Steps that the resumed attempt has not reached again are void too."""
    old = [record(step, rank, 1) for step in range(1, 10) for rank in range(2)]
    # Resumed after step 3; rank 1's first part isn't written yet.
    new = [record(4, 0, 2)]
    assert [(found.step, found.rank, found.attempt) for found in surviving_records(old + new)] == [
        (1, 0, 1),
        (1, 1, 1),
        (2, 0, 1),
        (2, 1, 1),
        (3, 0, 1),
        (3, 1, 1),
        (4, 0, 2),
    ]


def test_an_attempt_that_resumed_earlier_takes_back_two_older_ones():
    """An attempt that resumed earlier takes back two older ones."""
    first = [record(step, 0, 1) for step in range(1, 5)]
    second = [record(step, 0, 2) for step in range(4, 9)]
    third = [record(step, 0, 3) for step in range(2, 4)]
    assert [(found.step, found.attempt) for found in surviving_records(first + second + third)] == [
        (1, 1),
        (2, 3),
        (3, 3),
    ]


def test_ranks_that_a_smaller_new_attempt_no_longer_has_are_void_from_where_it_began():
    """Ranks that a smaller new attempt no longer has are void from where it began."""
    old = [record(step, rank, 1) for step in (1, 2, 3) for rank in range(3)]
    new = [record(step, 0, 2) for step in (3, 4)]
    assert {
        (found.step, found.rank) for found in surviving_records(old + new) if found.attempt == 1
    } == {(step, rank) for step in (1, 2) for rank in range(3)}


def test_time_lost_is_from_the_last_record_kept_to_the_first_one_after_the_restart():
    """Time lost is from the last record kept to the first one after the restart."""
    old = [record(step, 0, 1, time=100.0 + step) for step in range(1, 8)]
    new = [record(step, 0, 2, time=120.0 + step) for step in range(4, 6)]
    assert lost_time_s(old) == 0.0
    assert lost_time_s(old + new) == pytest.approx(124.0 - 103.0)
    from_scratch = [record(1, 0, 2, time=150.0)]
    assert lost_time_s(old + from_scratch) == pytest.approx(150.0 - 101.0)


def test_nan_and_inf_are_read_and_a_diverged_epoch_says_so():
    """Nan and inf are read and a diverged epoch says so."""
    shelf = Shelf(
        {
            part(0): line(1, loss="nan")
            + line(2, loss="inf")
            + line(3, loss="-inf")
            + line(4, loss=1.0)
        }
    )
    values = [found.metrics["loss"] for found in read_records(shelf, RUN)]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 1.0]
    assert math.isnan(epoch_rows(read_records(shelf, RUN))[0].metrics["loss"])


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
def test_a_damaged_line_is_left_out_with_a_warning_that_names_the_object(damage, caplog):
    """A damaged line is left out with a warning that names the object."""
    shelf = Shelf({part(0): line(1, loss=1.0) + damage, part(1): line(1, 1, loss=3.0)})
    with caplog.at_level(logging.WARNING):
        records = read_all_records(shelf, RUN)
    assert [(found.step, found.rank) for found in records] == [(1, 0), (1, 1)]
    (warning,) = [entry.getMessage() for entry in caplog.records]
    assert part(0) in warning
    assert "line 2" in warning


def test_a_frame_has_a_row_a_record_and_a_column_a_metric():
    """A frame has a row a record and a column a metric."""
    shelf = Shelf(
        {
            part(0): line(1, loss=1.0) + line(2, loss=0.5, accuracy=0.75),
            part(1): line(1, 1, loss="nan"),
        }
    )
    frame = records_frame(shelf, RUN)
    assert list(frame.columns) == [
        "step",
        "epoch",
        "rank",
        "attempt",
        "time",
        "num_samples",
        "loss",
        "accuracy",
    ]
    assert frame["step"].tolist() == [1, 1, 2]
    assert frame["loss"].mean() == pytest.approx(0.75)
    assert frame["accuracy"].isna().tolist() == [True, True, False]
    assert records_frame(Shelf(), RUN).empty


def test_without_pandas_the_error_says_what_to_do():
    """Without pandas the error says what to do."""
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "from prefect_torch_ddp.records.metrics import records_frame\n"
        "from prefect_torch_ddp.errors import InvalidParamsError\n"
        "try: records_frame(None, 'x')\n"
        "except InvalidParamsError as error: print(error)\n"
        "assert not {'torch', 'prefect', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install pandas" in done.stdout
