"""Records reach the storage once, whatever happens on the way."""

import json
import logging
import math
import threading

import pytest

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.records import log as records_log
from prefect_torch_ddp.records.log import RecordLog, left_behind, next_part_s, put_part
from tests.support.forwarding import MoodyStorage
from tests.support.records import read_records
from tests.support.waiting import wait_until

FOLDER = "runs/run/metrics/rank-00003"


@pytest.fixture
def storage(tmp_path):
    """Give a storage that may be made moody."""
    moody = MoodyStorage(tmp_path / "store", "well")
    moody.goes_on.set()
    return moody


def record(step, loss=1.0, **metrics):
    """Make a record of rank 3."""
    who = {"epoch": 1, "rank": 3, "attempt": 2, "time": 0.0, "num_samples": 4}
    return {"step": step, **who, "metrics": {"loss": loss, **metrics}}


def log_in(storage, **options) -> RecordLog:
    """Make the log of rank 3; without options its thread writes nothing by itself."""
    options = {"first_interval_s": 60.0, **options}
    return RecordLog(storage, "run", "metrics", rank=3, attempt=2, **options)


def steps_in(storage) -> list[int]:
    """Return the steps of all records."""
    return [found.step for found in read_records(storage, "run")]


def parts_of(storage) -> list[str]:
    """Return the names of all parts."""
    return [found.key.removeprefix(f"{FOLDER}/") for found in storage.list(FOLDER)]


def test_all_is_written(storage):
    """In order, under the rank and the attempt; by a flush, so that a checkpoint never gets ahead
    of its records, and at the end."""
    log = log_in(storage)
    for step in range(1, 401):
        log.append(record(step, 1 / step))
    log.flush()
    assert steps_in(storage) == list(range(1, 401))
    log.append(record(401))
    log.close()
    assert steps_in(storage) == list(range(1, 402))
    assert read_records(storage, "run")[3].metrics == {"loss": 0.25}
    assert parts_of(storage) == ["000002-000001.jsonl", "000002-000002.jsonl"]


def test_nan_is_valid_json(storage):
    """As text, which reads back as what it was."""
    log = log_in(storage)
    log.append(record(1, math.nan, norm=-math.inf))
    log.close()
    _, line, _ = storage.read(f"{FOLDER}/000002-000001.jsonl").split(b"\n")
    written = json.loads(line, parse_constant=pytest.fail)["metrics"]
    assert written == {"loss": "nan", "norm": "-inf"}
    (found,) = read_records(storage, "run")
    assert math.isnan(found.metrics["loss"])


@pytest.mark.parametrize("is_full", [False, True])
def test_the_background_writes_while_it_runs(storage, monkeypatch, is_full):
    """Without being asked: after a while, or when there is much."""
    monkeypatch.setattr(records_log, "FULL_BYTES", 10 if is_full else 2**20)
    log = log_in(storage, first_interval_s=600 if is_full else 0.01)
    log.append(record(1))
    wait_until(lambda: steps_in(storage) == [1])
    log.close()


def test_a_storage_that_recovers_loses_nothing(storage, caplog):
    """Records wait, one warning says so, and they are written once."""
    storage.mood = "refuses"
    log = log_in(storage, first_interval_s=0.01)
    log.append(record(1))
    wait_until(lambda: "kept, to be written later: 503 slow down" in caplog.text)
    log.append(record(2))
    storage.mood = "well"
    log.close()
    assert steps_in(storage) == [1, 2]
    assert caplog.text.count("kept, to be written later") == 1


def test_a_storage_that_stays_broken_is_an_error(storage):
    """With the number of records that are lost."""
    storage.mood = "refuses"
    log = log_in(storage)
    log.append(record(1))
    log.append(record(2))
    with pytest.raises(StorageError, match=r"2 records of metrics could not be written to .*503"):
        log.close()


def test_the_number_of_parts_of_a_long_run_is_bounded():
    """A day leaves some 440 a rank, an hour 110, and a minute six."""

    def num_parts(duration_s: float) -> int:
        age_s, interval_s, num = 0.0, 1.0, 0
        while age_s + interval_s <= duration_s:
            age_s, num = age_s + interval_s, num + 1
            interval_s = next_part_s(interval_s, age_s)
        return num

    assert num_parts(60) <= 6
    assert num_parts(3600) <= 115
    assert num_parts(24 * 3600) <= 450


def test_what_a_process_left_behind_comes_to_the_storage_once(storage, tmp_path):
    """All complete records of a dead process are stored once, in order."""
    log = log_in(storage, copies=tmp_path / "copies")
    for step in range(1, 101):
        log.append(record(step))
        if step == 40:
            log.flush()
    assert len(steps_in(storage)) == 40
    (copy,) = (tmp_path / "copies" / FOLDER).iterdir()
    copy.write_bytes(copy.read_bytes() + b'{"step"')
    (copy.parent / "000002-000003.jsonl").write_bytes(b'{"step"')
    for _ in range(2):  # a second time changes nothing
        for key, content in left_behind(tmp_path / "copies"):
            put_part(storage, key, content)
        assert steps_in(storage) == list(range(1, 101))
        assert parts_of(storage) == ["000002-000001.jsonl", "000002-000002.jsonl"]
    log.close()
    assert steps_in(storage) == list(range(1, 101))


def test_without_room_for_copies_the_records_still_arrive(storage, tmp_path, caplog):
    """One warning says what would be lost, and why."""
    (tmp_path / "copies").write_text("a file stands in the way")
    log = log_in(storage, copies=tmp_path / "copies")
    with caplog.at_level(logging.WARNING):
        log.append(record(1))
        log.append(record(2))
    log.close()
    assert steps_in(storage) == [1, 2]
    assert len(caplog.records) == 1
    assert "a kill of this rank would lose records" in caplog.text


class Computed:
    """A number that a device still computes."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def is_ready(self) -> bool:
        return self.done.is_set()

    def __float__(self) -> float:
        assert self.done.wait(30)
        return 0.5


def test_a_record_that_a_device_still_computes_holds_up_nobody(storage, tmp_path):
    """It is copied with the first one that comes once it is there; the order stays; a flush
    waits for it."""
    copies = tmp_path / "copies"
    log = log_in(storage, copies=copies)
    first, last = Computed(), Computed()
    log.append(record(1, first))
    log.append(record(2))
    assert not list(left_behind(copies))
    first.done.set()
    log.append(record(3, last))
    ((_, content),) = left_behind(copies)
    assert content.count(b"\n") == 1 + 2, "a head and two records"
    threading.Timer(0.05, last.done.set).start()
    log.flush()
    found = read_records(storage, "run")
    assert [(item.step, item.metrics["loss"]) for item in found] == [(1, 0.5), (2, 1.0), (3, 0.5)]
    log.close()
