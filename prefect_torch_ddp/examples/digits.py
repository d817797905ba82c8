"""Handwritten digits: a small CNN on the 1,797 images of 8x8 pixels in scikit-learn."""

from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import PILToTensor

from prefect_torch_ddp import ClassificationMeter, RankContext, Report, read_options
from prefect_torch_ddp.data import seeded_split
from prefect_torch_ddp.examples.digits_options import DigitsData, DigitsTraining
from prefect_torch_ddp.examples.schedules import one_cycle, renew_options

CLASSES = [str(digit) for digit in range(10)]


class Options(DigitsTraining, DigitsData):
    """All options of a run. Nothing is downloaded, so a run needs no source."""


def prepare(ctx: RankContext) -> None:
    """Write PNG files, one folder per digit, split once into train, val and test."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - ranks that only train needn't wait

    options = read_options(Options, ctx.options)
    digits, seed = load_digits(), options.split_seed
    learn, test = seeded_split(len(digits.target), options.held_out, seed, digits.target)
    train, val = seeded_split(len(learn), options.validation, seed, digits.target[learn])
    splits = {"test": test, "train": [learn[i] for i in train], "val": [learn[i] for i in val]}
    for split, indices in splits.items():
        for digit in CLASSES:
            (ctx.data / split / digit).mkdir(parents=True)
        for i in indices:
            pixels = (digits.images[i] * 255 / 16).round().astype("uint8")  # from 0 .. 16
            Image.fromarray(pixels).save(ctx.data / split / str(digits.target[i]) / f"{i:04}.png")


def train(ctx: RankContext) -> dict[str, float | None]:
    """Train with AdamW on a one-cycle learning rate; return the validation accuracy."""
    options = read_options(Options, ctx.options)
    net = DigitNet(options.dropout)
    model = ctx.wrap(net)
    loader = ctx.loader(images_of(ctx.data / "train"), global_batch_size=options.global_batch_size)
    validation = ctx.loader(images_of(ctx.data / "val"), global_batch_size=256, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=options.weight_decay)
    ctx.track(model=model, optimizer=optimizer)
    renew_options(optimizer)
    scheduler = one_cycle(
        ctx, optimizer, options.lr, epochs=options.epochs, num_batches=len(loader)
    )

    for images, targets in ctx.steps(loader, epochs=options.epochs):
        with torch.autocast(ctx.device.type, torch.bfloat16, enabled=ctx.device.type == "cuda"):
            loss = cross_entropy(model(images.to(ctx.device)), targets.to(ctx.device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ctx.report(loss=loss)
        if ctx.epoch_ended:
            scores = score(ctx, net, validation)
            ctx.report(validation_accuracy=scores.accuracy, validation_loss=scores.loss)
    return {"validation_accuracy": score(ctx, net, validation).accuracy}


def evaluate(ctx: RankContext) -> Report:
    """Score the trained model on the test split, which training never saw."""
    net = DigitNet().to(ctx.device)
    ctx.track(model=net)
    test = ctx.loader(images_of(ctx.data / "test"), global_batch_size=256, shuffle=False)
    return score(ctx, net, test, with_images=True)


class DigitNet(nn.Sequential):
    """Two convolutions and a linear layer: images [n, 1, 8, 8] from 0 to 1 to logits [n, 10]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(64 * 4 * 4, len(CLASSES)),
        )


def images_of(folder: Path) -> TensorDataset:
    """Read an image folder: images float32 [n, 1, 8, 8] from 0 to 1, targets int64 [n]."""
    # A split may have no image of a digit; its number is that of its folder all the same.
    folders = ImageFolder(folder, PILToTensor(), loader=_grey, allow_empty=True)
    images, targets = zip(*folders, strict=True)
    return TensorDataset(torch.stack(images) / 255, torch.tensor(targets))


def _grey(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("L")


@torch.no_grad()
def score(ctx: RankContext, net: nn.Module, loader: Any, *, with_images: bool = False) -> Report:
    """Count hits over all ranks, each on its share."""
    net.eval()
    meter = ClassificationMeter(CLASSES)
    for images, targets in loader:
        meter.update(net(images.to(ctx.device)), targets, images=images if with_images else None)
    net.train()
    return meter.report()
