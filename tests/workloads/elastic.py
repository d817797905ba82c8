"""Trainings with elastic determinism, whose weights are the same for every number of
ranks."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from prefect_torch_ddp import RankContext, Report
from prefect_torch_ddp.checkpoint.manifest import list_checkpoints
from tests.workloads.healthy import sha256_of_weights

NUM_SAMPLES, BATCH, EPOCHS = 45, 12, 2
"""Four steps an epoch; the last one has 9 samples."""


class NoisyImages(Dataset[tuple[torch.Tensor, int]]):
    """Small random images of three classes, with augmentation that draws from all three global
    generators."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index))
        noise = torch.rand(()).item() + random.random() + np.random.rand()
        return image + index % 3 + 0.1 * noise, index % 3


class ImagesInShards(NoisyImages):
    """The same in shards of uneven sizes, read one after the other."""

    __len__ = None  # type: ignore[assignment] # else it were a map-style dataset
    shuffle_buffer = 16

    def shards(self) -> list[range]:
        """Name them by what they hold."""
        return [range(20), range(20, 27), range(27, NUM_SAMPLES)]

    def num_samples(self, shard: range) -> int:
        """Return a shard's size."""
        return len(shard)

    def iter_shard(self, shard: range) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield a shard's samples."""
        return map(self.__getitem__, shard)


def prepare(ctx: RankContext) -> None:
    """Write nothing of use: the images are made from their numbers."""
    (ctx.data / "made").write_text("from numbers")


def train(ctx: RankContext) -> dict[str, Any]:
    """Train undisturbed."""
    return fit(ctx)


def evaluate(ctx: RankContext) -> Report:
    """Say how many samples there were."""
    ctx.track(model=make_net())
    return Report(num_samples=NUM_SAMPLES, accuracy=1.0)


def make_net() -> nn.Sequential:
    """Return a float32 network with convolution, norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8 * 6 * 6, 32),
        nn.LayerNorm(32),
        nn.ReLU(),
        nn.Linear(32, 3),
    )


def fit(
    ctx: RankContext, folder: str = "", plan: dict[int, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Train with AdamW; say what weights and optimizer hash to.

    Args:
        ctx: options: sharded, global_batch_size, num_workers, max_samples, precision
            ("bfloat16", "scaled").
        folder: for a file of this rank's pid when it waits to be killed.
        plan: by attempt: {"step", "how"}, where how is "wait", or "die" for the last rank's
            death between two micro-batches.
    """
    options = ctx.options
    torch.manual_seed(ctx.rank)  # rank 0's weights are the ones that count
    net = make_net()
    model = ctx.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=options.get("precision") == "scaled")
    ctx.track(model=model, optimizer=optimizer, scaler=scaler)
    size, num_workers = options.get("global_batch_size", BATCH), options.get("num_workers", 0)
    dataset = ImagesInShards() if options.get("sharded") else NoisyImages()
    loader = ctx.loader(dataset, global_batch_size=size, num_workers=num_workers)
    for batch in ctx.steps(loader, epochs=EPOCHS):
        optimizer.zero_grad()
        fault = (plan or {}).get(ctx.attempt)
        is_due = fault is not None and ctx.step == fault["step"]
        losses, weights = [], []
        for (images, labels), weight in ctx.micro_batches(
            batch, max_samples=options.get("max_samples")
        ):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled="precision" in options):
                loss = nn.functional.cross_entropy(
                    model(images.to(ctx.device)), labels.to(ctx.device)
                )
            scaler.scale(loss * weight).backward()
            losses.append(loss.item() * weight)
            weights.append(weight)
            if is_due:
                _fail(ctx, fault["how"], folder)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        ctx.report(loss=sum(losses) / sum(weights))
    state = optimizer.state_dict()["state"]
    moments = (
        torch.cat([values["exp_avg_sq"].flatten() for values in state.values()])
        .double()
        .sum()
        .item()
    )
    return {"sha256": sha256_of_weights(net), "moments": moments, "steps": ctx.step}


def _fail(ctx: RankContext, how: str, folder: str) -> None:
    while not any(
        ref.step == ctx.step - 1 for ref in list_checkpoints(ctx.config.storage, ctx.run_id)
    ):
        time.sleep(0.02)  # else it may resume from an earlier one
    if how == "wait":
        Path(folder, f"waits-{ctx.attempt}-{ctx.rank}").write_text(str(os.getpid()))
        signal.pause()
    if ctx.rank == ctx.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
