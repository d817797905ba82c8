"""The workload that made `storage-0.1`: a linear classifier of points. Kept as it was."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import ClassificationMeter, RankContext, Report


def prepare(ctx: RankContext) -> None:
    """Write points of two classes, for training and evaluation."""
    draw = torch.Generator().manual_seed(1)
    for split, num in (("train", 24), ("test", 8)):
        points = torch.randn(num, 2, generator=draw)
        torch.save({"x": points, "y": (points.sum(1) > 0).long()}, ctx.data / f"{split}.pt")


def _points(ctx: RankContext, split: str) -> TensorDataset:
    found = torch.load(ctx.data / f"{split}.pt", weights_only=True)
    return TensorDataset(found["x"], found["y"])


def train(ctx: RankContext) -> dict[str, int]:
    """Train for some epochs."""
    epochs = int(ctx.options.get("epochs", 2))
    model = ctx.wrap(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(_points(ctx, "train"), global_batch_size=6)
    for x, y in ctx.steps(loader, epochs=epochs):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
    return {"epochs": epochs}


def evaluate(ctx: RankContext) -> Report:
    """Classify the points that were held out."""
    model = nn.Linear(2, 2)
    ctx.track(model=model)
    meter = ClassificationMeter(["below", "above"])
    for x, y in ctx.loader(_points(ctx, "test"), global_batch_size=4, shuffle=False):
        with torch.no_grad():
            meter.update(model(x), y)
    return meter.report()
