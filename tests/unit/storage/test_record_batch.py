"""Shows that the records of a process that is killed are found, and come to the storage
once."""

import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp.records.log import left_behind, put_part
from prefect_torch_ddp.records.metrics import MetricLog, read_all_records
from prefect_torch_ddp.storage.directory import DirectoryStorage

FOLDER = "runs/run/metrics/rank-00003"


def record(step: int, loss: Any = 1.0) -> dict[str, Any]:
    """Make a record of rank 3."""
    return {
        "step": step,
        "epoch": 1,
        "rank": 3,
        "attempt": 2,
        "time": 0.0,
        "num_samples": 4,
        "metrics": {"loss": loss},
    }


def bring_home(copies: Path, storage: DirectoryStorage) -> list[int]:
    """Write what was left; return the steps that the storage then has."""
    for key, content in left_behind(copies):
        put_part(storage, key, content)
    return [found.step for found in read_all_records(storage, "run")]


def test_the_records_of_a_killed_process_are_found(tmp_path: Path) -> None:
    """All of them, in order, also those that came after the last part."""
    code = (
        "import os, sys; from pathlib import Path\n"
        "from prefect_torch_ddp.records.metrics import MetricLog\n"
        "from prefect_torch_ddp.storage.directory import DirectoryStorage\n"
        "from tests.unit.storage.test_record_batch import record\n"
        "storage, copies = DirectoryStorage(Path(sys.argv[1])), Path(sys.argv[2])\n"
        "log = MetricLog(storage, 'run', rank=3, attempt=2, first_interval_s=60, copies=copies)\n"
        "for step in range(1, 101):\n"
        "    log.append(record(step))\n"
        "    if step == 40: log.flush()\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store"), str(tmp_path / "copies")]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    storage = DirectoryStorage(tmp_path / "store")
    assert len(read_all_records(storage, "run")) == 40
    assert bring_home(tmp_path / "copies", storage) == list(range(1, 101))
    assert bring_home(tmp_path / "copies", storage) == list(range(1, 101)), (
        "a second time changes nothing"
    )
    assert [found.key for found in storage.list(FOLDER)] == [
        f"{FOLDER}/000002-{part:06d}.jsonl" for part in (1, 2)
    ]


def test_a_part_that_arrived_before_its_writer_heard_so_is_not_there_twice(tmp_path: Path) -> None:
    """The copy stays until the storage has answered; then it is known by its content."""
    storage, copies = DirectoryStorage(tmp_path / "store"), tmp_path / "copies"
    log = MetricLog(storage, "run", rank=3, attempt=2, first_interval_s=60, copies=copies)
    log.append(record(1))
    ((key, content),) = left_behind(copies)
    storage.write(key, content)
    assert bring_home(copies, storage) == [1]
    log.close()
    assert [found.step for found in read_all_records(storage, "run")] == [1]
    assert not list(left_behind(copies))


def test_a_key_that_another_process_took_is_left_to_it(tmp_path: Path) -> None:
    """The records go behind it."""
    storage = DirectoryStorage(tmp_path)
    assert (
        put_part(storage, f"{FOLDER}/000002-000009.jsonl", b"a\n")
        == f"{FOLDER}/000002-000009.jsonl"
    )
    assert (
        put_part(storage, f"{FOLDER}/000002-000009.jsonl", b"b\n")
        == f"{FOLDER}/000002-000010.jsonl"
    )
    assert storage.read(f"{FOLDER}/000002-000009.jsonl") == b"a\n"


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
    log = MetricLog(
        storage, "run", rank=3, attempt=2, first_interval_s=60, copies=tmp_path / "copies"
    )
    with caplog.at_level(logging.WARNING):
        log.append(record(1))
        log.append(record(2))
    log.close()
    assert [found.step for found in read_all_records(storage, "run")] == [1, 2]
    assert len(caplog.records) == 1
    assert "a kill of this rank would lose records" in caplog.text


class Computed:
    """A number that a device still computes."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def is_ready(self) -> bool:
        """Tell without waiting."""
        return self.done.is_set()

    def __float__(self) -> float:
        """Wait."""
        assert self.done.wait(30)
        return 0.5


def test_a_record_that_a_device_still_computes_holds_up_nobody(tmp_path: Path) -> None:
    """It is copied with the first one that comes once it is there; the order stays; a flush
    waits for it."""
    storage, copies = DirectoryStorage(tmp_path / "store"), tmp_path / "copies"
    log = MetricLog(storage, "run", rank=3, attempt=2, first_interval_s=60, copies=copies)
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
    found = read_all_records(storage, "run")
    assert [(item.step, item.metrics["loss"]) for item in found] == [(1, 0.5), (2, 1.0), (3, 0.5)]
    log.close()
