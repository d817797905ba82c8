"""Shows when a training counts as finished: as long as its record and its last checkpoint are
there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from prefect_torch_ddp import TrainParams
from prefect_torch_ddp.checkpoint.attempts import claim_attempt, write_failure, write_resume
from prefect_torch_ddp.checkpoint.keys import CheckpointId, finished_key, manifest_key
from prefect_torch_ddp.checkpoint.manifest import Manifest, checkpoint_ref
from prefect_torch_ddp.errors import SupersededError
from prefect_torch_ddp.protocol.events import FailureRecord
from prefect_torch_ddp.results import TrainingSummary
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.train import failed_attempts
from prefect_torch_ddp.tasks.train_run import Run
from prefect_torch_ddp.tracking.finished import finished_training, write_finished

MANIFEST = Manifest("run", 7, 1, epoch=1, position={}, world_size=2)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Describe a run with one checkpoint, whose first attempt is claimed."""
    storage = DirectoryStorage(tmp_path)
    claim_attempt(storage, "run")
    storage.write(manifest_key("run", 7, 1), MANIFEST.as_bytes())
    with disable_run_logger():
        yield Run("run", TrainParams(), storage, "dataset", "experiment")


def report_of(run: Run) -> TrainingSummary:
    """Make the report of its training."""
    return TrainingSummary(
        run_id="run",
        attempt=1,
        world_size=2,
        num_steps=7,
        num_epochs=1,
        duration_s=1.5,
        value={"accuracy": 0.5, "diverged": "nan"},
        last_checkpoint=checkpoint_ref(run.storage, MANIFEST),
    )


def test_a_finished_training_is_recognised(run: Run) -> None:
    """Its report is the one that was recorded; another run's isn't it, and an older attempt
    records nothing."""
    assert finished_training(run.storage, run.run_id) is None
    write_finished(run.storage, run.run_id, report_of(run))
    assert finished_training(run.storage, run.run_id) == report_of(run)
    assert finished_training(run.storage, "other") is None
    claim_attempt(run.storage, "run")
    with pytest.raises(SupersededError, match="attempt 1 of run run has been superseded"):
        write_finished(run.storage, run.run_id, report_of(run))


@pytest.mark.parametrize(
    "damage", ["no checkpoint", "a void checkpoint", "a damaged checkpoint", "a damaged record"]
)
def test_it_counts_only_with_what_it_left(run: Run, damage: str) -> None:
    """A training runs again if its checkpoint was deleted or superseded, or its record is
    unreadable."""
    write_finished(run.storage, run.run_id, report_of(run))
    if damage == "no checkpoint":
        run.storage.delete(manifest_key("run", 7, 1))
    elif damage == "a void checkpoint":
        write_resume(run.storage, "run", claim_attempt(run.storage, "run"), CheckpointId(6, 1))
    else:
        run.storage.write(
            finished_key("run") if damage == "a damaged record" else manifest_key("run", 7, 1),
            b'{"attempt": 1',
        )
    assert finished_training(run.storage, run.run_id) is None


def test_a_move_is_no_failure(run: Run) -> None:
    """The record has the reason of a move or growth, and the summary lists only failures."""
    write_failure(run.storage, "run", FailureRecord(1, 1, "workers for 2", None, 5, is_move=True))
    write_failure(run.storage, "run", FailureRecord(2, 2, "rank 1 died", None, 7))
    assert [(each.attempt, each.summary) for each in failed_attempts(run)] == [(2, "rank 1 died")]
