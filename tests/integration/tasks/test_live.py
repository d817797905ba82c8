"""What a live report shows between the attempts of a training."""

from pathlib import Path

from prefect_torch_ddp.protocol.events import AttemptBegan, Progress
from prefect_torch_ddp.storage.directory import DirectoryStorage
from prefect_torch_ddp.tasks.report.curves import Curves
from prefect_torch_ddp.tasks.report.live import LiveReport
from prefect_torch_ddp.tasks.report.progress import TrainingProgress
from prefect_torch_ddp.tracking.recorder import RunRecorder
from tests.support.pages import RECORD


def test_a_step_after_a_restart_has_no_loss_of_the_attempt_before_it(tmp_path: Path) -> None:
    """Its own loss is shown as soon as records of the new attempt have been read."""
    storage, shown = DirectoryStorage(tmp_path), TrainingProgress()
    live = LiveReport(storage, shown, RunRecorder(storage, RECORD))

    def read(curves: Curves) -> None:
        live._readings.curves = curves
        live._show(curves)

    live.receive(AttemptBegan(1, 2))
    live.receive(Progress(20, 1, 105))
    read(Curves(last={"loss": 0.343}, attempt=1))
    assert shown.line.startswith("epoch 1 · step 20/105 · loss 0.343")
    live.receive(AttemptBegan(2, 2))
    live.receive(Progress(1, 1, 105))
    assert shown.line == "epoch 1 · step 1/105"
    read(Curves(last={"loss": 0.343}, attempt=1))
    assert shown.line == "epoch 1 · step 1/105"
    read(Curves(last={"loss": 2.3}, attempt=2))
    live.receive(Progress(2, 1, 105))
    assert shown.line.startswith("epoch 1 · step 2/105 · loss 2.3")
