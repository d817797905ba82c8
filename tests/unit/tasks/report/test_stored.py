"""What a page reads of a run in its storage."""

from pathlib import Path

import pytest

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.report import stored
from prefect_torch_ddp.tasks.report.stored import Readings
from tests.support.pages import RECORD, page_of
from tests.support.tracked import steps_over


@pytest.mark.parametrize("most", [1, 500])
def test_epochs_that_are_not_read_are_said_to_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Of a training with very many records, which would take long to read once more."""
    monkeypatch.setattr(stored, "MAX_RECORDS", most)
    with RankContext.local(storage=tmp_path) as ctx:
        for _ in steps_over(ctx, 4, epochs=2):
            ctx.report(loss=1.0)
    readings = Readings(DirectoryStorage(tmp_path), 0.0)
    record = RECORD.model_copy(update={"run_id": "local"})
    shown: dict[str, object] = {}
    for is_last in (False, True):
        asked = {"is_last": is_last, "has_previous": True, "needs_epochs": True}
        due = readings.due(record, **asked)
        shown |= {name: read() for name, read in due.items()}
    page = page_of(record=record, **shown)
    said = "The epochs are left out: the training has more than 1 records. `read_metrics` has them."
    assert (said in page) is (most == 1)
    assert ("| epoch | steps |" in page) is (most > 1)
