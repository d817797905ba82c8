"""A rank's lines in the storage: whole, in few objects, whatever the storage does."""

import re

import pytest

from prefect_torch_ddp.records import log as records_log
from prefect_torch_ddp.records import rank_log
from prefect_torch_ddp.records.rank_log import LogFolder, RankLogWriter
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.forwarding import MoodyStorage
from tests.support.waiting import HANG_S, wait_until

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "


@pytest.fixture
def folder(tmp_path):
    """Give the folder of a run's lines; its other files are elsewhere."""
    return tmp_path / "runs/run/logs"


def written(folder) -> list[str]:
    """Return the lines of all parts without their times, which all have one."""
    lines = "".join(path.read_text() for path in sorted(folder.iterdir())).splitlines()
    assert all(re.match(STAMP, line) for line in lines)
    return [re.sub(STAMP, "", line, count=1) for line in lines]


def test_a_short_log_is_one_object_and_an_attempt_overwrites_no_other(tmp_path, folder):
    """The object is written at the end, and a second run of the task appends parts."""
    storage = DirectoryStorage(tmp_path)
    for number, attempt in enumerate((1, 2, 2)):
        writer = RankLogWriter(LogFolder(storage, "run"), 3, attempt)
        writer.add([f"printed {number}", "grün"])
        writer.add(["logged"], "WARNING user.code: ")
        assert writer.uri == f"{folder}/rank-00003/{attempt:06d}-*.txt"
        writer.end()
        assert writer.join(HANG_S) == ""
    names = sorted(path.name for path in (folder / "rank-00003").iterdir())
    assert names == ["000001-000001.txt", "000002-000001.txt", "000002-000002.txt"]
    assert written(folder / "rank-00003") == [
        line
        for number in range(3)
        for line in (f"printed {number}", "grün", "WARNING user.code: logged")
    ]
    silent = RankLogWriter(LogFolder(storage, "run", "logs/evaluate"), 0, 1)
    assert silent.join(HANG_S) == ""
    assert not (folder / "evaluate").exists()


def test_a_large_log_is_written_at_once_and_nothing_is_lost_or_doubled(
    tmp_path, folder, monkeypatch, caplog
):
    """Though the first write seems to fail, and more lines come before it is tried again."""
    monkeypatch.setattr(records_log, "FULL_BYTES", 1_000)
    storage = MoodyStorage(tmp_path, "loses answers")
    writer = RankLogWriter(LogFolder(storage, "run"), 0, 1)
    lines = [f"line {number}" for number in range(500)]
    for line in lines[:100]:
        writer.add([line])
    storage.goes_on.set()
    wait_until(lambda: "kept, to be written later: the answer got lost" in caplog.text)
    writer.add(lines[100:])
    storage.mood = "well"
    assert writer.join(HANG_S) == ""
    assert written(folder / "rank-00000") == lines
    assert len(list((folder / "rank-00000").iterdir())) > 1


def test_a_storage_that_keeps_nobody_waiting(tmp_path, folder, monkeypatch):
    """What doesn't fit in memory meanwhile is lost, and the end says how much that is."""
    monkeypatch.setattr(rank_log, "MAX_WAITING_BYTES", 1_000)
    monkeypatch.setattr(records_log, "FULL_BYTES", 500)
    storage = MoodyStorage(tmp_path, "well")
    writer = RankLogWriter(LogFolder(storage, "run"), 0, 1)
    for number in range(1_000):
        writer.add([f"line {number}"])
    storage.goes_on.set()
    wait_until(lambda: writer._log.num_waiting_bytes < rank_log.MAX_WAITING_BYTES)
    storage.goes_on.clear()
    writer.add(["after it"])
    assert "has not taken the last lines for 0 s" in writer.join(0.0)
    storage.goes_on.set()
    trouble = writer.join(HANG_S)
    *kept, last = written(folder / "rank-00000")
    assert trouble == f"the storage was too slow for {1_000 - len(kept)} lines"
    assert kept == [f"line {number}" for number in range(len(kept))]
    assert (len(kept) < 50, last) == (True, "after it")
