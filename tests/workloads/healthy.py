"""Small trainings whose results compare to the last bit: in float64, and with elastic
determinism."""

import hashlib
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
from torch.utils.data import Dataset, TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from tests.support.waiting import wait_until
from tests.workloads import descend, wait_for_checkpoint, write_pid
from tests.workloads.failing import fail

NUM_CLASSES = 3


def train(ctx: RankContext) -> dict[str, Any]:
    """Train on 33 points with batch norm, dropout, momentum and a schedule; say what the weights
    hash to.

    Options: epochs, stop_at (step), die_at, die_on (rank), die_after (step of the checkpoint that
    is to be on record first).
    """
    options = ctx.options
    bare = make_net()
    model = ctx.wrap(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    ctx.track(optimizer=optimizer, model=model, scheduler=scheduler)
    loader = ctx.loader(TensorDataset(*points(33)), global_batch_size=12)
    for inputs, targets in ctx.steps(loader, epochs=options.get("epochs", 4)):
        loss = nn.functional.cross_entropy(model(inputs.to(ctx.device)), targets.to(ctx.device))
        descend(ctx, optimizer, loss)
        scheduler.step()
        if ctx.step == options.get("stop_at"):
            ctx.request_stop("the test says so")
        if ctx.step == options.get("die_at") and ctx.rank == options.get("die_on", 0):
            die_after_checkpoint(ctx, options.get("die_after"))
    return {"sha256": sha256_of_weights(bare), "steps": ctx.step}


def points(num_samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs float64 [n, 4] and targets int64 [n], the same ones always."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(NUM_CLASSES, (num_samples,), generator=generator)


def make_net() -> nn.Sequential:
    """Return a float64 network from [batch, 4] to [batch, 3]."""
    layers = (
        nn.Linear(4, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Linear(16, NUM_CLASSES),
    )
    return nn.Sequential(*layers).double()


def die_after_checkpoint(ctx: RankContext, step: int | None) -> None:
    """Kill this process, once the checkpoint of a step is on record."""
    deadline = time.monotonic() + 20
    while step is not None and time.monotonic() < deadline:
        if step in {manifest.step for manifest in list_manifests(ctx.config.storage, ctx.run_id)}:
            break
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def sha256_of_weights(model: nn.Module) -> str:
    """Hash parameters and buffers, to the last bit."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


# ---- With elastic determinism, and restarted.

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
        return [range(20), range(20, 27), range(27, NUM_SAMPLES)]

    def num_samples(self, shard: range) -> int:
        return len(shard)

    def iter_shard(self, shard: range) -> Iterator[tuple[torch.Tensor, int]]:
        return map(self.__getitem__, shard)


def make_elastic_net() -> nn.Sequential:
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


def fit_elastic(
    ctx: RankContext, folder: str = "", plan: dict[int, dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Train with AdamW; say what weights and optimizer hash to.

    Args:
        ctx: options: sharded, global_batch_size, num_workers, max_samples, precision
            ("bfloat16", "scaled"), overflow_at (a step whose loss is infinite).
        folder: for a file of this rank's pid when it waits for others to join.
        plan: see `fail_as_planned`; the last rank fails between two micro-batches.
    """
    options = ctx.options
    torch.manual_seed(ctx.rank)  # rank 0's weights are the ones that count
    net = make_elastic_net()
    model = ctx.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # No powers of two: bits depend on it.
    growth: dict[str, Any] = {"init_scale": 1000.0, "growth_factor": 1.7, "growth_interval": 2}
    scales = options.get("precision") == "scaled"
    scaler = torch.amp.GradScaler("cpu", enabled=scales, **growth)
    ctx.track(model=model, optimizer=optimizer, scaler=scaler)
    size, num_workers = options.get("global_batch_size", BATCH), options.get("num_workers", 0)
    dataset = ImagesInShards() if options.get("sharded") else NoisyImages()
    loader = ctx.loader(dataset, global_batch_size=size, num_workers=num_workers)
    for batch in ctx.steps(loader, epochs=EPOCHS):
        optimizer.zero_grad()
        losses, weights = [], []
        for (images, labels), weight in ctx.micro_batches(
            batch, max_samples=options.get("max_samples")
        ):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled="precision" in options):
                loss = nn.functional.cross_entropy(
                    model(images.to(ctx.device)), labels.to(ctx.device)
                )
            factor = float("inf") if ctx.step == options.get("overflow_at") else 1.0
            scaler.scale(loss * weight * factor).backward()
            losses.append(loss.item() * weight)
            weights.append(weight)
            fail_as_planned(ctx, plan or {})
            wait_as_planned(ctx, plan or {}, folder)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        drawn = torch.rand(()).item() if ctx.config.is_elastic else 0.0  # alike on all ranks
        ctx.report(loss=sum(losses) / sum(weights))
    state = optimizer.state_dict()["state"]
    squares = torch.cat([values["exp_avg_sq"].flatten() for values in state.values()])
    moments = squares.double().sum().item()
    ended = {"steps": ctx.step, "scale": scaler.get_scale(), "drawn": drawn}
    return {"sha256": sha256_of_weights(net), "moments": moments, **ended}


def wait_as_planned(ctx: RankContext, plan: dict[int, dict[str, Any]], folder: str) -> None:
    """In an attempt planned with "grow", wait at the first step for workers to have joined, which
    a file says, and at `step` for the order to stop."""
    fault = plan.get(ctx.attempt, {"how": ""})
    if fault["how"] != "grow":
        return
    if ctx.step == 1:
        write_pid(folder, f"waits-{ctx.attempt}-{ctx.rank}")
        wait_until(Path(folder, "joined").exists)
    elif ctx.step == fault["step"]:
        wait_until(
            ctx._assembly.link.stop_requested
        )  # nothing public tells it before the agreement


def fail_as_planned(ctx: RankContext, plan: dict[int, dict[str, Any]]) -> None:
    """Fail in the attempts planned, at a step: {attempt: {"step", "how"}}, with how as the
    last rank's way to fail."""
    fault = plan.get(ctx.attempt)
    if fault is None or ctx.step != fault["step"] or fault["how"] == "grow":
        return
    wait_for_checkpoint(ctx, ctx.step, ctx.step - 2)  # they come every other step, or each
    if ctx.rank == ctx.world_size - 1:
        fail(fault["how"])
