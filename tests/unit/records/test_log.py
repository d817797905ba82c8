"""Records reach the storage once, whatever happens on the way."""

import json
import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.records import log as records_log
from prefect_torch_ddp.records.log import RecordLog, left_behind, next_interval_s, put_part
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.storage.protocol import Storage
from tests.support.forwarding import MoodyStorage
from tests.support.records import read_records
from tests.support.waiting import wait_until

FOLDER = "runs/run/metrics/rank-00003"


def record(step: int, loss: Any = 1.0, **metrics: Any) -> dict[str, Any]:
    """Make a record of rank 3."""
    who = {"epoch": 1, "rank": 3, "attempt": 2, "time": 0.0, "num_samples": 4}
    return {"step": step, **who, "metrics": {"loss": loss, **metrics}}


def log_in(storage: Storage, **options: Any) -> RecordLog:
    """Make the log of rank 3; without options its thread writes nothing by itself."""
    options = {"first_interval_s": 60.0, **options}
    return RecordLog(storage, "run", "metrics", rank=3, attempt=2, **options)


def steps_in(storage: DirectoryStorage) -> list[int]:
    """Return the steps of all records."""
    return [found.step for found in read_records(storage, "run")]


def bring_home(copies: Path, storage: DirectoryStorage) -> list[int]:
    """Write what was left behind; return the steps that the storage then has."""
    for key, content in left_behind(copies):
        put_part(storage, key, content)
    return steps_in(storage)


def test_all_is_written(tmp_path: Path) -> None:
    """In order, under the rank and the attempt; by a flush, so that a checkpoint never gets ahead
    of its records, and at the end."""
    storage = DirectoryStorage(tmp_path)
    log = log_in(storage)
    for step in range(1, 401):
        log.append(record(step, 1 / step))
    log.flush()
    assert steps_in(storage) == list(range(1, 401))
    log.append(record(401))
    log.close()
    assert steps_in(storage) == list(range(1, 402))
    assert read_records(storage, "run")[3].metrics == {"loss": 0.25}
    assert (tmp_path / f"{FOLDER}/000002-000001.jsonl").exists()


def test_nan_is_valid_json(tmp_path: Path) -> None:
    """As text, which reads back as what it was."""
    log = log_in(DirectoryStorage(tmp_path))
    log.append(record(1, math.nan, norm=-math.inf))
    log.close()
    line = (tmp_path / f"{FOLDER}/000002-000001.jsonl").read_text()
    written = json.loads(line, parse_constant=pytest.fail)["metrics"]
    assert written == {"loss": "nan", "norm": "-inf"}
    (found,) = read_records(DirectoryStorage(tmp_path), "run")
    assert math.isnan(found.metrics["loss"])


@pytest.mark.parametrize("is_full", [False, True])
def test_the_background_writes_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """Without being asked: after a while, or when there is much."""
    monkeypatch.setattr(records_log, "FULL_BYTES", 10 if is_full else 2**20)
    storage = DirectoryStorage(tmp_path)
    log = log_in(storage, first_interval_s=600 if is_full else 0.01)
    log.append(record(1))
    wait_until(lambda: steps_in(storage) == [1])
    log.close()


def test_a_storage_that_recovers_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Records wait, one warning says so, and they are written once."""
    storage = MoodyStorage(tmp_path, "refuses")
    storage.goes_on.set()
    log = log_in(storage, first_interval_s=0.01)
    log.append(record(1))
    wait_until(lambda: "kept to try again: 503 slow down" in caplog.text)
    log.append(record(2))
    storage.mood = "well"
    log.close()
    assert steps_in(DirectoryStorage(tmp_path)) == [1, 2]
    assert caplog.text.count("kept to try again") == 1


def test_what_arrived_though_it_seemed_to_fail_is_not_written_twice(tmp_path: Path) -> None:
    """Also where more records have come since."""
    storage = MoodyStorage(tmp_path, "loses answers")
    storage.goes_on.set()
    log = log_in(storage)
    log.append(record(1))
    with pytest.raises(StorageError, match="the answer got lost"):
        log.flush()
    storage.mood = "well"
    log.append(record(2))
    log.close()
    assert steps_in(DirectoryStorage(tmp_path)) == [1, 2]


def test_a_storage_that_stays_broken_is_an_error(tmp_path: Path) -> None:
    """With the number of records that are lost."""
    storage = MoodyStorage(tmp_path, "refuses")
    storage.goes_on.set()
    log = log_in(storage)
    log.append(record(1))
    log.append(record(2))
    with pytest.raises(StorageError, match=r"2 records of metrics could not be written to .*503"):
        log.close()


def test_a_second_log_of_the_same_attempt_overwrites_nothing(tmp_path: Path) -> None:
    """A process that is started again within an attempt adds parts."""
    storage = DirectoryStorage(tmp_path)
    for step in (1, 2):
        log = log_in(storage)
        log.append(record(step))
        log.close()
    assert steps_in(storage) == [1, 2]


def test_the_number_of_parts_of_a_long_run_is_bounded() -> None:
    """A day leaves some 440 a rank, an hour 110, and a minute six."""

    def num_parts(duration_s: float) -> int:
        age_s, interval_s, num = 0.0, 1.0, 0
        while age_s + interval_s <= duration_s:
            age_s, num = age_s + interval_s, num + 1
            interval_s = next_interval_s(interval_s, age_s)
        return num

    assert num_parts(60) <= 6
    assert num_parts(3600) <= 115
    assert num_parts(24 * 3600) <= 450


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    """A machine that lost power may have half of one."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x/000001-000001.jsonl").write_bytes(b'{"a": 1}\n{"b"')
    (tmp_path / "x/000001-000002.jsonl").write_bytes(b'{"c"')
    assert list(left_behind(tmp_path)) == [("x/000001-000001.jsonl", b'{"a": 1}\n')]


def test_without_room_for_copies_the_records_still_arrive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says what would be lost, and why."""
    (tmp_path / "copies").write_text("a file stands in the way")
    storage = DirectoryStorage(tmp_path / "store")
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


def test_a_record_that_a_device_still_computes_holds_up_nobody(tmp_path: Path) -> None:
    """It is copied with the first one that comes once it is there; the order stays; a flush
    waits for it."""
    storage, copies = DirectoryStorage(tmp_path / "store"), tmp_path / "copies"
    log = log_in(storage, copies=copies)
    first, last = Computed(), Computed()
    log.append(record(1, first))
    log.append(record(2))
    assert not list(left_behind(copies))
    first.done.set()
    log.append(record(3, last))
    ((_, content),) = left_behind(copies)
    assert content.count(b"\n") == 2
    threading.Timer(0.05, last.done.set).start()
    log.flush()
    found = read_records(storage, "run")
    assert [(item.step, item.metrics["loss"]) for item in found] == [(1, 0.5), (2, 1.0), (3, 0.5)]
    log.close()
