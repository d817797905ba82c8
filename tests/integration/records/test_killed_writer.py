"""The records of a process that is killed are found, and come to the storage once."""

import signal
import subprocess
import sys
from pathlib import Path

from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.records import read_records
from tests.unit.records.test_log import FOLDER, bring_home

CODE = f"""
import os, sys; from pathlib import Path
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.unit.records.test_log import log_in, record
log = log_in(DirectoryStorage(Path(sys.argv[1])), copies=Path(sys.argv[2]))
for step in range(1, 101):
    log.append(record(step))
    if step == 40: log.flush()
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""


def test_the_records_of_a_killed_process_are_found(tmp_path: Path) -> None:
    """All of them, in order, also those that came after the last part."""
    command = [sys.executable, "-c", CODE, str(tmp_path / "store"), str(tmp_path / "copies")]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    storage = DirectoryStorage(tmp_path / "store")
    assert len(read_records(storage, "run")) == 40
    assert bring_home(tmp_path / "copies", storage) == list(range(1, 101))
    assert bring_home(tmp_path / "copies", storage) == list(range(1, 101)), (
        "a second time changes nothing"
    )
    assert [found.key for found in storage.list(FOLDER)] == [
        f"{FOLDER}/000002-{part:06d}.jsonl" for part in (1, 2)
    ]
