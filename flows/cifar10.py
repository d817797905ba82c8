"""CIFAR-10: torchvision's vgg11_bn for 32x32 pixels, validated after each epoch."""

import io
import json
import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torchvision.models import vgg11_bn
from torchvision.transforms import v2

from flows.options import Cifar10Data, Cifar10Training
from prefect_torch_ddp import (
    ClassificationMeter,
    InvalidParamsError,
    RankContext,
    Report,
    read_options,
)
from prefect_torch_ddp.data import read_files, seeded_split
from prefect_torch_ddp.examples.schedules import one_cycle, renew_options

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
IMAGE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
"""The class, then the pixels, red first: https://www.cs.toronto.edu/~kriz/cifar.html."""
AUGMENT = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])
MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
NORMALIZE = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


IN_PICKLES = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}
"""All that an array of CIFAR-10 needs: a pickle with any other name isn't run."""


class Options(Cifar10Training, Cifar10Data):
    """All options of a run.

    The run's source is the folder cifar-10-batches-bin, or cifar-10-batches-py, which
    torchvision.datasets.CIFAR10 downloads.
    """


def prepare(ctx: RankContext) -> None:
    """Write {train,val,test}.npz: images uint8 [n, 3, 32, 32] and targets uint8 [n]."""
    options = read_options(Options, ctx.options)
    learn, test = records_in(ctx, "data_batch_"), records_in(ctx, "test_batch")
    train, val = seeded_split(
        len(learn), options.validation, options.split_seed, learn[:, 0].tolist()
    )
    for split, records in {"train": learn[train], "val": learn[val], "test": test}.items():
        np.savez(
            ctx.data / f"{split}.npz",
            images=records[:, 1:].reshape(-1, *IMAGE),
            targets=records[:, 0],
        )


def train(ctx: RankContext) -> dict[str, float | str | None]:
    """Train with SGD; return the validation accuracy, and what the model's card has to say."""
    options = read_options(Options, ctx.options)
    net = make_net()
    model = ctx.wrap(net)
    held_out = Images(ctx, "val")
    loader = ctx.loader(
        Images(ctx, "train", augmented=True),
        global_batch_size=options.global_batch_size,
        num_workers=options.num_workers,
    )
    optimizer = torch.optim.SGD(
        model.parameters(),
        options.lr,
        momentum=0.9,
        nesterov=True,
        weight_decay=options.weight_decay,
    )
    ctx.track(model=model, optimizer=optimizer)
    renew_options(optimizer)
    scheduler = make_schedule(ctx, optimizer, options, len(loader))

    for inputs, targets in ctx.steps(loader, epochs=options.epochs):
        with torch.autocast(ctx.device.type, torch.bfloat16, enabled=ctx.device.type == "cuda"):
            loss = cross_entropy(
                model(inputs.to(ctx.device)), targets.to(ctx.device), label_smoothing=0.1
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        ctx.report(loss=loss, lr=scheduler.get_last_lr()[0])
        if ctx.epoch_ended:
            scores = score(ctx, net, held_out)
            ctx.report(validation_accuracy=scores.accuracy, validation_loss=scores.loss)
    return {
        "validation_accuracy": score(ctx, net, held_out).accuracy,
        "classes": json.dumps(CLASSES),
        "mean": json.dumps(MEAN),
        "std": json.dumps(STD),
    }


def evaluate(ctx: RankContext) -> Report:
    """Score the trained model on the test images, which training never saw."""
    net = make_net().to(ctx.device)
    ctx.track(model=net)
    return score(ctx, net, Images(ctx, "test"), with_images=True)


def make_schedule(
    ctx: RankContext, optimizer: torch.optim.Optimizer, options: Options, num_batches: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Make the schedule that was chosen, for so many batches an epoch."""
    if options.schedule == "constant":
        return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return one_cycle(ctx, optimizer, options.lr, epochs=options.epochs, num_batches=num_batches)


def make_net() -> nn.Module:
    """Return vgg11_bn for small images: float32 [n, 3, 32, 32] to logits [n, 10]."""
    net: nn.Module = vgg11_bn(num_classes=len(CLASSES))
    net.avgpool = nn.Identity()  # five poolings leave a single pixel of 32x32
    net.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(512, len(CLASSES)))
    return net


class Images(Dataset[tuple[Tensor, int]]):
    """A split in memory; augmented, an image is another one each time."""

    def __init__(self, ctx: RankContext, split: str, *, augmented: bool = False) -> None:
        with np.load(ctx.data / f"{split}.npz", allow_pickle=False) as saved:
            self.images, self.targets = torch.from_numpy(saved["images"]), saved["targets"].tolist()
        self.transform = v2.Compose([AUGMENT, NORMALIZE]) if augmented else NORMALIZE

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.targets[index]


@torch.no_grad()
def score(ctx: RankContext, net: nn.Module, images: Images, *, with_images: bool = False) -> Report:
    """Count hits over all ranks, each on its share."""
    net.eval()
    meter = ClassificationMeter(CLASSES)
    for inputs, targets in ctx.loader(images, global_batch_size=512, shuffle=False):
        meter.update(net(inputs.to(ctx.device)), targets, images=inputs if with_images else None)
    net.train()
    return meter.report()


def records_in(ctx: RankContext, begin: str) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Read the source's files, binary ones or torchvision's, that begin so: uint8 [n, 3073].

    Raises:
        InvalidParamsError: there are none, or of both kinds, or one is damaged.
    """
    uri, records, kinds = ctx.source.uri, [], set()
    for name, content in read_files(ctx.source, begin):
        if "." in name and not name.endswith(".bin"):
            continue
        kinds.add(name.endswith(".bin"))
        if len(kinds) > 1:
            msg = f"{uri} has {begin}* of both versions, each image twice: give a folder of one"
            raise InvalidParamsError(msg)
        values = np.frombuffer(
            content if name.endswith(".bin") else unpickled(name, content), np.uint8
        )
        num, rest = divmod(len(values), RECORD_BYTES)
        if not num or rest or values[::RECORD_BYTES].max() >= len(CLASSES):
            msg = f"{name} in {uri} is damaged, or not of CIFAR-10: records of {RECORD_BYTES} bytes"
            raise InvalidParamsError(msg)
        records.append(values.reshape(-1, RECORD_BYTES))
    if not records:
        msg = (
            f"{uri} has no {begin}*; unpack cifar-10-binary.tar.gz and give its folder "
            "cifar-10-batches-bin, or cifar-10-batches-py, which torchvision downloads"
        )
        raise InvalidParamsError(msg)
    return np.concatenate(records)


def unpickled(name: str, content: bytes) -> bytes:
    """Return the records of one of torchvision's files, as a binary one has them.

    Raises:
        InvalidParamsError: it is damaged, or has something else than arrays and texts.
    """
    try:
        batch = Arrays(io.BytesIO(content), encoding="bytes").load()
        pixels = np.asarray(batch[b"data"], np.uint8)
        targets = np.asarray(batch[b"labels"], np.uint8)
        return np.concatenate([targets[:, None], pixels], axis=1).tobytes()
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError) as error:
        msg = f"{name} is damaged, or no file of cifar-10-batches-py: {error}"
        raise InvalidParamsError(msg) from error


class Arrays(pickle.Unpickler):
    """Makes arrays of a pickle, and runs no other code."""

    def find_class(self, module: str, name: str) -> Any:
        """Find what makes an array.

        Raises:
            UnpicklingError: the pickle wants something else.
        """
        if (module, name) not in IN_PICKLES:
            msg = f"it would run {module}.{name}"
            raise pickle.UnpicklingError(msg)
        if name == "_reconstruct":
            module = "numpy._core.multiarray"  # where numpy 2 has it
        return super().find_class(module, name)
