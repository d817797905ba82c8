"""A training that logs each step and is killed on the way, as people write it with Lightning's
loggers and with W&B's resume; `python -m tests.benchmarks.logged lightning FOLDER STEP...` runs it
until it ends or is killed. `ours` is the function of a task."""

import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from prefect_torch_ddp import RankContext

NUM_STEPS, SAVE_EVERY, BATCH_SIZE = 1000, 25, 4
WITHIN_S = 0.02
"""So soon after a step was logged it is killed; a step takes some 10 ms."""
STEP_S = 0.01


class Kills:
    """Kills this process shortly after each of the given steps, once each."""

    def __init__(self, folder: Path, steps: list[int]) -> None:
        self._folder, self._steps = folder, set(steps)

    def logged(self, step: int) -> None:
        """Take the time of a step; be killed if it is one of those."""
        mark = self._folder / f"killed-after-{step}"
        if step in self._steps and not mark.exists():
            mark.touch()
            after_s = random.Random(step).uniform(0, WITHIN_S)
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        threading.Event().wait(STEP_S)


def rows() -> TensorDataset:
    """Return those of one epoch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_STEPS * BATCH_SIZE, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def ours(ctx: RankContext, folder: str, steps: list[int]) -> None:
    """Train on a rank that is killed."""
    kills = Kills(Path(folder), steps)
    model = ctx.wrap(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    for x, y in ctx.steps(ctx.loader(rows(), global_batch_size=BATCH_SIZE), epochs=1):
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
        kills.logged(ctx.step)


def by_lightning(folder: Path, kills: Kills) -> None:
    """Train with Lightning, its TensorBoardLogger and its CSVLogger, as its pages have it."""
    import pytorch_lightning as lightning
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

    class Net(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            x, y = batch
            loss = mse_loss(self.layer(x), y)
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *_: object) -> None:
            kills.logged(self.global_step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    saves = ModelCheckpoint(folder / "saves", every_n_train_steps=SAVE_EVERY, save_last=True)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=[
            TensorBoardLogger(folder, name="tensorboard", version=""),
            CSVLogger(folder, name="csv", version=""),
        ],
        log_every_n_steps=1,
        callbacks=[saves],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(rows(), BATCH_SIZE), ckpt_path="last")


def by_wandb(folder: Path, kills: Kills) -> None:
    """Train with torch alone and `wandb.init(id=..., resume="allow")`, without internet."""
    import wandb

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved, begin = folder / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved)
        begin = state.pop("step")
        model.load_state_dict(state)
    run = wandb.init(project="p", id="run", resume="allow", mode="offline", dir=folder)
    for step, (x, y) in enumerate(DataLoader(rows(), BATCH_SIZE), 1):
        if step <= begin:
            continue
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss.item()}, step=step)
        kills.logged(step)
        if step % SAVE_EVERY == 0:
            torch.save({**model.state_dict(), "step": step}, folder / "new.pt")
            (folder / "new.pt").rename(saved)
    run.finish()


if __name__ == "__main__":
    way, folder, *steps = sys.argv[1:]
    ways = {"lightning": by_lightning, "wandb": by_wandb}
    ways[way](Path(folder), Kills(Path(folder), [int(step) for step in steps]))
