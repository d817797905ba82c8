"""The recorder: when it says that an epoch has ended, and what it finds of earlier attempts."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from prefect_torch_ddp import CheckpointParams, DirectoryStorage, StorageError
from prefect_torch_ddp.checkpoint.commit import Committer
from prefect_torch_ddp.checkpoint.manifest import Manifest
from prefect_torch_ddp.protocol.events import AttemptBegan, CheckpointCommitted, Progress
from prefect_torch_ddp.records.run_record import RunRecord, read_run_record
from prefect_torch_ddp.tracking.bus import RunEvents
from prefect_torch_ddp.tracking.description import end_run_record
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


@pytest.mark.usefixtures("said")
def test_a_checkpoint_that_no_record_tells_of_is_found(tmp_path: Path) -> None:
    """The record of an attempt that was killed, or whose storage was full, lacks its checkpoints.

    A retry that failed then said nothing of how to continue the run.
    """
    storage, began = DirectoryStorage(tmp_path), datetime.now(UTC)
    record = RunRecord(run_id="run", experiment="e", workload="w", began=began, storage="s")
    RunRecorder(storage, record).write()
    for step in (10, 20):
        Committer(storage, "run", 1, CheckpointParams()).commit(Manifest("run", step, 1, 1, {}, 1))
    retry = RunRecorder(storage, record)
    retry.receive(AttemptBegan(2, 1, ("host",)))
    retry.end(StorageError("the disk is full"))
    retry.write()
    found = read_run_record(storage, "run").checkpoint
    assert found is not None
    assert (found.step, found.attempt) == (20, 1)


@pytest.mark.usefixtures("said")
def test_the_best_value_of_an_attempt_that_was_killed_is_found(tmp_path: Path) -> None:
    """Its record lacks it, and the worse one of the retry was shown and compared instead.

    Nor is it lost if the retry commits a checkpoint before its record can be written.
    """
    storage, began = DirectoryStorage(tmp_path), datetime.now(UTC)
    about = {"run_id": "run", "experiment": "e", "workload": "w", "began": began, "storage": "s"}
    record = RunRecord(**about, best_metric="accuracy")
    RunRecorder(storage, record).write()
    policy = CheckpointParams(best_metric="accuracy")
    killed = Manifest("run", 10, 1, 1, {}, 1, metrics={"accuracy": 0.9})
    Committer(storage, "run", 1, policy).commit(killed)
    retry = RunRecorder(storage, record)
    retry.receive(AttemptBegan(2, 1, ("host",)))
    retry.receive(CheckpointCommitted(20, 2, 1, 0.5))
    retry.write()
    assert read_run_record(storage, "run").best_value == 0.9
    retry.receive(CheckpointCommitted(30, 3, 1, 0.95))
    retry.end(None)
    retry.write()
    assert read_run_record(storage, "run").best_value == 0.95


@pytest.mark.parametrize(("mode", "best"), [("max", 0.9), ("min", 0.2)])
def test_a_flow_that_ends_a_killed_training_records_its_best_value(
    mode: str, best: float, tmp_path: Path
) -> None:
    """`runs` showed the run without a score, or with an older one."""
    storage, began = DirectoryStorage(tmp_path), datetime.now(UTC)
    about = {"run_id": "run", "experiment": "e", "workload": "w", "began": began, "storage": "s"}
    record = RunRecord(**about, best_metric="accuracy", best_mode=mode, best_value=0.3)
    policy = CheckpointParams(best_metric="accuracy", best_mode=mode)
    for step, value in ((10, 0.9), (20, 0.2)):
        metrics = {"accuracy": value}
        killed = Manifest("run", step, 1, 1, {}, 1, metrics=metrics)
        Committer(storage, "run", 1, policy).commit(killed)
    end_run_record(storage, record, OSError("lost"), is_tried_again=False)
    found = read_run_record(storage, "run")
    assert found.best_value == best
    assert found.checkpoint is not None
    assert found.checkpoint.step == 20
