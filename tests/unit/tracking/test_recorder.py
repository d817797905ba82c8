"""The recorder: when it says that an epoch has ended, and with which metrics."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import DirectoryStorage
from prefect_torch_ddp.protocol.events import AttemptBegan, Progress
from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.tracking.bus import RunEvents
from prefect_torch_ddp.tracking.recorder import RunRecorder


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Return what would go to Prefect's bus, which isn't there."""
    found: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(RunEvents, "emit", lambda _, name, **more: found.append((name, more)))
    monkeypatch.setattr(RunEvents, "flush", lambda _: None)
    return found


def test_an_epoch_is_said_with_its_own_metrics(
    tmp_path: Path, said: list[tuple[str, dict[str, Any]]]
) -> None:
    """Not when other records are read, nor for an earlier task run's; the last one at the end."""
    record = RunRecord(
        run_id="r", experiment="e", workload="w", began=datetime.now(UTC), storage="s"
    )
    recorder = RunRecorder(DirectoryStorage(tmp_path), record)
    recorder.read({"val_loss": 9.0}, 1, 5)
    recorder.receive(AttemptBegan(2, 2))
    recorder.read({"val_loss": 9.0}, 1, 5)
    recorder.receive(Progress(4, 1, 8))
    recorder.receive(Progress(5, 2, 8))
    recorder.read({"val_loss": 0.9}, 2, 0)
    recorder.read({"val_loss": 0.5}, 2, 1)
    recorder.read({"val_loss": 0.4}, 2, 1)
    recorder.receive(Progress(8, 2, 8))
    recorder.end(None)
    recorder.read({"val_loss": 0.3}, 2, 1)
    recorder.flush()
    epochs = [more for name, more in said if name == "epoch.completed"]
    assert [(each["epoch"], each["metrics"]["val_loss"]) for each in epochs] == [(1, 0.5), (2, 0.3)]
