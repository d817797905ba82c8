"""Shows that records reach the storage, whatever happens on the way."""

import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.records.metrics import MetricLog, read_all_records
from prefect_torch_ddp.storage.directory import DirectoryStorage

_broken = threading.Event()


@dataclass(frozen=True)
class BreakableStorage(DirectoryStorage):
    """A directory that refuses to write while it is broken."""

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Write it, or refuse."""
        if _broken.is_set():
            msg = "503 slow down"
            raise StorageError(msg)
        return super().write_if_absent(key, data)


class DeafStorage(BreakableStorage):
    """A directory that writes, and while it is broken says that it didn't: an answer that was
    lost."""

    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Write it; say so, or not."""
        written = DirectoryStorage.write_if_absent(self, key, data)
        if _broken.is_set():
            msg = "the connection was reset"
            raise StorageError(msg)
        return written


@pytest.fixture(autouse=True)
def _whole_again() -> Any:
    _broken.clear()
    yield
    _broken.clear()


def record(step: int, **metrics: Any) -> dict[str, Any]:
    """Make a record of rank 3."""
    return {
        "step": step,
        "epoch": 1,
        "rank": 3,
        "attempt": 2,
        "time": 0.0,
        "num_samples": 4,
        "metrics": metrics,
    }


def test_close_writes_all(tmp_path: Path) -> None:
    """In order, under the rank and the attempt."""
    log = MetricLog(DirectoryStorage(tmp_path), "run", rank=3, attempt=2)
    for step in range(1, 501):
        log.append(record(step, loss=1 / step))
    log.close()
    found = read_all_records(DirectoryStorage(tmp_path), "run")
    assert [item.step for item in found] == list(range(1, 501))
    assert found[3].metrics == {"loss": 0.25}
    assert (tmp_path / "runs/run/metrics/rank-00003/000002-000001.jsonl").exists()


def test_nan_is_valid_json(tmp_path: Path) -> None:
    """As text, which reads back as what it was."""
    log = MetricLog(DirectoryStorage(tmp_path), "run", rank=0, attempt=1)
    log.append(record(1, loss=math.nan, norm=-math.inf))
    log.close()
    line = (tmp_path / "runs/run/metrics/rank-00000/000001-000001.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["metrics"] == {
        "loss": "nan",
        "norm": "-inf",
    }
    (found,) = read_all_records(DirectoryStorage(tmp_path), "run")
    assert math.isnan(found.metrics["loss"])


def test_flush_makes_a_part_of_what_was_appended(tmp_path: Path) -> None:
    """So that a checkpoint never gets ahead of the records before it."""
    log = MetricLog(DirectoryStorage(tmp_path), "run", rank=0, attempt=1, first_interval_s=60)
    log.append(record(1, loss=1))
    log.flush()
    assert len(read_all_records(DirectoryStorage(tmp_path), "run")) == 1
    log.append(record(2, loss=1))
    log.close()
    assert [item.step for item in read_all_records(DirectoryStorage(tmp_path), "run")] == [1, 2]


def test_the_background_writes_while_it_runs(tmp_path: Path) -> None:
    """Without being asked."""
    log = MetricLog(DirectoryStorage(tmp_path), "run", rank=0, attempt=1, first_interval_s=0.01)
    log.append(record(1, loss=1))
    appeared = threading.Event()
    for _ in range(500):
        if list(
            DirectoryStorage(tmp_path).list("runs/run/metrics/rank-00000/000001-")
        ) or appeared.wait(0.01):
            break
    assert len(read_all_records(DirectoryStorage(tmp_path), "run")) == 1
    log.close()


def test_a_storage_that_recovers_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Records wait, one warning says so, and they are written once."""
    _broken.set()
    log = MetricLog(BreakableStorage(tmp_path), "run", rank=0, attempt=1, first_interval_s=0.01)
    log.append(record(1, loss=1))
    waiting = threading.Event()
    for _ in range(500):
        if "kept to try again: 503 slow down" in caplog.text or waiting.wait(0.01):
            break
    log.append(record(2, loss=1))
    _broken.clear()
    log.close()
    assert [item.step for item in read_all_records(DirectoryStorage(tmp_path), "run")] == [1, 2]
    assert len([item for item in caplog.records if "kept to try again" in item.message]) == 1


def test_what_arrived_though_it_seemed_to_fail_is_not_written_twice(tmp_path: Path) -> None:
    """Also where more records have come since."""
    log = MetricLog(DeafStorage(tmp_path), "run", rank=0, attempt=1, first_interval_s=60)
    log.append(record(1, loss=1))
    _broken.set()
    with pytest.raises(StorageError, match="reset"):
        log.flush()
    _broken.clear()
    log.append(record(2, loss=1))
    log.close()
    assert [item.step for item in read_all_records(DirectoryStorage(tmp_path), "run")] == [1, 2]


def test_a_storage_that_stays_broken_is_an_error(tmp_path: Path) -> None:
    """With the number of records that are lost."""
    _broken.set()
    log = MetricLog(BreakableStorage(tmp_path), "run", rank=0, attempt=1)
    log.append(record(1, loss=1))
    log.append(record(2, loss=1))
    with pytest.raises(StorageError, match=r"2 metric records could not be written to .*503"):
        log.close()


def test_a_second_log_of_the_same_attempt_overwrites_nothing(tmp_path: Path) -> None:
    """A process that is started again within an attempt adds parts."""
    for step in (1, 2):
        log = MetricLog(DirectoryStorage(tmp_path), "run", rank=0, attempt=1)
        log.append(record(step, loss=1))
        log.close()
    assert [item.step for item in read_all_records(DirectoryStorage(tmp_path), "run")] == [1, 2]
