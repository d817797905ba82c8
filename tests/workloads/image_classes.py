"""A workload over images in folders, wherever they are: the raw data is read where it
lies, from its index."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from prefect_torch_ddp import RankContext, Report, image_folder, write_index
from prefect_torch_ddp.rank.evaluation import ClassificationMeter

SIZE = 8


def prepare(ctx: RankContext) -> None:
    """Write the index of the raw data."""
    num_objects = write_index(ctx.source, ctx.data)
    print(f"indexed {num_objects} objects")


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Make a small tensor."""
    return torch.from_numpy(
        np.asarray(image.resize((SIZE, SIZE)), dtype=np.float32) / 255
    ).flatten()


def images(ctx: RankContext) -> Dataset[Any]:
    """Open the images."""
    return image_folder(ctx.source, to_tensor, index=ctx.data)


def train(ctx: RankContext) -> dict[str, Any]:
    """Train a linear classifier."""
    dataset = images(ctx)
    print(f"reads a {type(dataset).__name__} of {len(dataset)} images")  # type: ignore[arg-type]
    torch.manual_seed(ctx.seed)
    model = ctx.wrap(torch.nn.Linear(3 * SIZE * SIZE, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(dataset, global_batch_size=8, num_workers=ctx.options.get("num_workers", 1))
    for pixels, labels in ctx.steps(loader, epochs=3):
        loss = cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss)
    return {"weight": float(sum(p.detach().double().sum() for p in model.parameters()))}


@torch.no_grad()
def evaluate(ctx: RankContext) -> Report:
    """Count over the same images."""
    model = torch.nn.Linear(3 * SIZE * SIZE, 2)
    ctx.track(model=model)
    dataset: Any = images(ctx)
    meter = ClassificationMeter(dataset.classes)
    for pixels, labels in ctx.loader(dataset, global_batch_size=16, shuffle=False):
        meter.update(model(pixels), labels)
    return meter.report()
