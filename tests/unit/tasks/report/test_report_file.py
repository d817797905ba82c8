"""The report in the storage: what a storage takes too late replaces nothing newer."""

import threading
from pathlib import Path

import pytest

from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.report import report_file
from prefect_torch_ddp.tasks.report.page.headline import RunView
from prefect_torch_ddp.tasks.report.page.links import report_key, runs_key
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tasks.report.report_file import ReportFile
from tests.support.forwarding import WatchedStorage
from tests.support.pages import RECORD
from tests.support.waiting import HANG_S


def test_a_report_that_was_given_up_writes_no_further_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the training doesn't wait for a storage that hangs; when that answers again, the
    flow may have written its own report."""
    answers = threading.Event()
    report = f"write {report_key(RECORD.run_id)}"

    def hang(request: str) -> None:
        if request == report:
            assert answers.wait(HANG_S)

    training = RunView(RECORD, TrainingProgress(4))
    done = RECORD.model_copy(update={"state": "completed"})
    final = RunView(done, TrainingProgress(4, status="finished"))
    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(report_file, "TIMEOUT_S", 0.1)
        late = ReportFile(WatchedStorage(tmp_path, hang), training).start()
        assert "hasn't taken it" in late.join()
    storage = DirectoryStorage(tmp_path)
    assert ReportFile(storage, final).start().join() == ""
    runs = storage.read(runs_key(RECORD))
    answers.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG_S)
    assert storage.read(runs_key(RECORD)) == runs
