"""Lightning, under `torchrun --max-restarts`, since its Trainer doesn't start again by itself.

`ModelCheckpoint` saves every 100 steps and links the newest as `last`, which `ckpt_path="last"`
loads, as its page "Saving and loading checkpoints" says. The loss is logged at every step; the
logger is the default one.
"""

import os

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.benchmarks.peers.training import (
    BATCH_SIZE,
    EPOCHS,
    FOLDER,
    LR,
    NUM_RANKS,
    SAVE_EVERY,
    Observed,
    make_data,
    make_model,
)


class Net(lightning.LightningModule):  # type: ignore[misc]
    """The model, its step and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.observed = Observed(int(os.environ["RANK"]))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = cross_entropy(self.layers(inputs), targets)
        with self.observed.reporting():
            self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        self.observed.step(self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR)


if __name__ == "__main__":
    saves = ModelCheckpoint(FOLDER / "saves", every_n_train_steps=SAVE_EVERY, save_last="link")
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        strategy="ddp",
        devices=NUM_RANKS,
        callbacks=[saves],
        default_root_dir=FOLDER,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(make_data(), BATCH_SIZE, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path="last")
