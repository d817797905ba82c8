"""Lightning's Trainer with data of any kind, and with validations of your own.

In one process; `tests/integration/integrations/test_lightning.py` kills ranks.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.plugins import AsyncCheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, Strategy, XLAStrategy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from prefect_torch_ddp import CheckpointParams, InvalidParamsError, RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.integrations import lightning
from prefect_torch_ddp.integrations.lightning import attach
from prefect_torch_ddp.storage.directory import DirectoryStorage

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # what Lightning says of the machine
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what Lightning sets for good removed."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


class Net(pl.LightningModule):
    """A net of one layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[torch.Tensor], _index: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Streamed(IterableDataset[list[torch.Tensor]]):
    """Ten rows, without a length."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return ([torch.full((2,), row / 10)] for row in range(10))


def loader() -> DataLoader[Any]:
    """Return ten batches of one row."""
    return DataLoader(TensorDataset(torch.arange(20.0).reshape(10, 2) / 20))


def trainer(folder: Path, **options: Any) -> pl.Trainer:
    """Return a Trainer that writes nothing by itself."""
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(**usual | options)


class ByHand(Net):
    """Makes a step every four batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.manual_backward(super().training_step(batch, index))
        if index % 4 == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()


def context(folder: Path, every_steps: int = 4) -> Any:
    """Return the context of an attempt; it has a checkpoint every few steps."""
    policy = CheckpointParams(every_s=None, every_steps=every_steps, keep_last=9)
    return RankContext.local(storage=folder, run_id="run", checkpoint=policy)


def steps_in(folder: Path) -> list[int]:
    """Return the steps of all commits."""
    return [each.step for each in list_manifests(DirectoryStorage(folder), "run")]


def test_a_loader_without_a_length_is_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of steps is then unknown; -1 was refused at the first step."""
    shown = []
    progress = RankContext.progress

    def noted(ctx: RankContext, step: int, total: int | None = None, *, epoch: int = 0) -> None:
        shown.append((step, total, epoch))
        progress(ctx, step, total, epoch=epoch)

    monkeypatch.setattr(RankContext, "progress", noted)
    with context(tmp_path):
        fitted = trainer(tmp_path)
        fitted.fit(Net(), DataLoader(Streamed()), ckpt_path=attach(fitted))
    assert shown == [(step, None, 1 + (step > 10)) for step in range(1, 21)]
    assert steps_in(tmp_path) == [4, 8, 12, 16, 20]


def test_validations_outside_of_fit_are_only_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after it, also of a training that has ended: they need no data for training."""
    signs = []
    monkeypatch.setattr(lightning, "report_progress", lambda: signs.append("life"))
    progress = RankContext.progress

    def noted(ctx: RankContext, step: int, *args: Any, **named: Any) -> None:
        signs.append(step)
        progress(ctx, step, *args, **named)

    monkeypatch.setattr(RankContext, "progress", noted)
    for is_first in (True, False):
        with context(tmp_path):
            fitted, net = trainer(tmp_path, limit_val_batches=2, max_epochs=1), Net()
            newest = attach(fitted)
            fitted.validate(net, loader())
            fitted.fit(net, loader(), loader(), ckpt_path=newest)
            fitted.validate(net, loader())
        # In `fit` two validated batches belong to the last step.
        steps = [*range(1, 11), 10, 10] if is_first else []
        assert signs == ["life", "life", *steps, "life", "life"]
        signs.clear()
        assert steps_in(tmp_path) == [4, 8, 10]


@pytest.mark.parametrize(
    ("net", "patience", "last"),
    [(Net, 1, 1), (ByHand, 1, 1), (ByHand, 99, 4)],
    ids=["early stop", "early stop, by hand", "last epoch, by hand"],
)
def test_an_end_within_an_accumulation_has_a_checkpoint(
    tmp_path: Path, net: type[Net], patience: int, last: int
) -> None:
    """It has the weights of the last step. After a restart no step is added."""
    ends = []
    for _ in range(2):
        stopping = EarlyStopping("val_loss", 1e9, patience, check_finite=False)
        options: dict[str, Any] = {"val_check_interval": 3, "callbacks": [stopping]}
        if net is Net:
            options["accumulate_grad_batches"] = 4
        with context(tmp_path, every_steps=3):
            fitted, model = trainer(tmp_path, **options), net()
            fitted.fit(model, loader(), loader(), ckpt_path=attach(fitted))
        assert steps_in(tmp_path)[-1] == last
        ends.append((fitted.global_step, model.layer.weight.tolist()))
    assert ends[0] == ends[1]
    assert ends[0][0] == last


class WithOptions(Net):
    """Keeps what it is given in its checkpoints."""

    def __init__(self, folder: Any, rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_checkpoint_that_a_restart_would_refuse_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning names the type, and the argument of `fit` by which it is loaded."""

    def train(folder: Any, max_epochs: int, **options: Any) -> list[str]:
        caplog.clear()
        with context(tmp_path / "runs"):
            fitted = trainer(tmp_path, max_epochs=max_epochs)
            model = WithOptions(folder, 0.1)
            fitted.fit(model, loader(), ckpt_path=attach(fitted), **options)
        ours = (each for each in caplog.records if each.name == lightning.__name__)
        return [each.getMessage() for each in ours]

    (said,) = train(tmp_path, 1)
    assert re.search(r"of step 4, .*\(Unsupported global: GLOBAL pathlib\.\w*PosixPath\)\.", said)
    with pytest.raises(UnpicklingError):
        train(tmp_path, 2)
    assert train(tmp_path, 2, weights_only=False) == []
    assert steps_in(tmp_path / "runs")[-1] == 20
    shutil.rmtree(tmp_path / "runs")
    assert train(str(tmp_path), 1) == []
    assert train(str(tmp_path), 2) == []


def test_a_plugin_that_writes_later_is_refused(tmp_path: Path) -> None:
    """A commit would lack what it still writes, and the commits before it would be deleted."""
    fitted = trainer(tmp_path, plugins=[AsyncCheckpointIO()])
    with context(tmp_path), pytest.raises(InvalidParamsError, match=r"it uses AsyncCheckpointIO"):
        attach(fitted)


class Elsewhere(TorchCheckpointIO):
    """Writes nothing to where it is told to."""

    def save_checkpoint(self, *_: Any, **__: Any) -> None: ...


def test_a_save_that_wrote_no_file_is_refused(tmp_path: Path) -> None:
    """At the first one, before it is committed; the error names the plugin."""
    said = r"Elsewhere, the Trainer's CheckpointIO, has not written .*trainer\.ckpt at step 4"
    with context(tmp_path):
        fitted = trainer(tmp_path, plugins=[Elsewhere()])
        with pytest.raises(InvalidParamsError, match=said):
            fitted.fit(Net(), loader(), ckpt_path=attach(fitted))
    assert steps_in(tmp_path) == []


class Tuned(DDPStrategy):
    """Saves as DDP does."""


class Sharded(DDPStrategy):
    """Saves in its own way, as those of DeepSpeed and XLA do, which are DDP's subclasses too."""

    def save_checkpoint(self, *_: Any, **__: Any) -> None: ...


def test_a_strategy_of_ddps_that_saves_in_its_own_way_is_refused(tmp_path: Path) -> None:
    """The error names it, before the first step; one that only changes something else is taken."""
    said = "it uses Sharded, a strategy other than DDP, or with a save_checkpoint of its own"
    with context(tmp_path):
        with pytest.raises(InvalidParamsError, match=said):
            attach(trainer(tmp_path, strategy=Sharded()))
        assert attach(trainer(tmp_path, strategy=Tuned())) is None
    for kind in (DeepSpeedStrategy, XLAStrategy):
        assert issubclass(kind, DDPStrategy), "it would be taken for DDP"
        assert kind.save_checkpoint is not Strategy.save_checkpoint
