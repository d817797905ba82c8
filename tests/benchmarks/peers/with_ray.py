"""Ray Train: `TorchTrainer` with `FailureConfig(max_failures=-1)`.

As in its guides "Saving and Loading Checkpoints" and "Handling Failures": rank 0 writes a folder,
all ranks call `report`, and `get_checkpoint` returns the newest. `report` is a barrier, so the loss
is reported once per epoch and with each checkpoint, as in Ray's guides. Ray starts on this machine
by itself, with its defaults.
"""

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
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


def fit(config: dict[str, Any]) -> None:
    """Train on one rank."""
    rank = ray.train.get_context().get_world_rank()
    observed = Observed(rank)
    model = prepare_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loader = prepare_data_loader(DataLoader(make_data(), BATCH_SIZE, shuffle=True))
    step = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    for epoch in range(step // len(loader), EPOCHS):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in islice(loader, step % len(loader), None):
            loss = cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % len(loader) == 0:
                with observed.reporting():
                    ray.train.report({"loss": loss.item()})
            observed.step(step)
            if step % SAVE_EVERY == 0:
                with tempfile.TemporaryDirectory() as folder:
                    checkpoint = None
                    if rank == 0:
                        parts = {
                            "model": model.module.state_dict(),
                            "optimizer": optimizer.state_dict(),
                        }
                        torch.save({**parts, "step": step}, Path(folder) / "state.pt")
                        checkpoint = ray.train.Checkpoint.from_directory(folder)
                    ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)


if __name__ == "__main__":
    TorchTrainer(
        fit,
        train_loop_config={"lr": LR},
        scaling_config=ray.train.ScalingConfig(num_workers=NUM_RANKS),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(FOLDER / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
