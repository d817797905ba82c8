"""Land use: any classifier of torchvision on an image folder, such as UC Merced's 21 classes."""

import json
from collections.abc import Sequence
from typing import Any

import safetensors.torch
import torch
import torchvision
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import Subset
from torchvision.transforms import v2

from flows.options import LandUseData, LandUseTraining
from prefect_torch_ddp import (
    ClassificationMeter,
    InvalidParamsError,
    RankContext,
    Report,
    read_options,
    storage_from_uri,
)
from prefect_torch_ddp.data import image_folder, seeded_split, write_index
from prefect_torch_ddp.examples.schedules import one_cycle, renew_options

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TO_TENSOR = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
TURN = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]  # from above there is no up and down
WITH_AUXILIARY_HEADS = {"googlenet", "inception_v3"}


class Options(LandUseTraining, LandUseData):
    """All options of a run. Its source is the folder of the classes' folders, local or s3://."""


def prepare(ctx: RankContext) -> None:
    """Write the images' index, so that ranks don't list them, and a split of each class."""
    options = read_options(Options, ctx.options)
    write_index(ctx.source, ctx.data)
    found = image_folder(ctx.source, index=ctx.data)
    train, test = seeded_split(len(found), options.held_out, options.split_seed, found.targets)
    split = {"classes": found.classes, "train": train, "test": test}
    (ctx.data / "split.json").write_text(json.dumps(split), encoding="utf-8")


def train(ctx: RankContext) -> dict[str, int | str]:
    """Train with AdamW or SGD on a one-cycle rate; mixed precision, compiled, in micro-batches.

    The returned value is in the model's card: what has to be known to use it.
    """
    options = read_options(Options, ctx.options)
    classes, dataset = images_of(ctx, "train", TURN)
    net = make_net(options, len(classes))
    if options.compile:
        net.compile(backend=options.compile)  # in place: the state's names stay
    model = ctx.wrap(net)
    loader = ctx.loader(
        dataset, global_batch_size=options.global_batch_size, num_workers=options.num_workers
    )
    optimizer = make_optimizer(model, options)
    scaler = torch.amp.GradScaler(ctx.device.type, enabled=options.precision == "float16")
    ctx.track(model=model, optimizer=optimizer)
    if scaler.is_enabled():  # one that isn't has no state that a run in float16 could continue from
        ctx.track(scaler=scaler)
    renew_options(optimizer)
    scheduler = one_cycle(
        ctx,
        optimizer,
        options.lr,
        epochs=options.epochs,
        num_batches=len(loader),
        cycle_momentum=options.optimizer == "adamw",
    )

    for batch in ctx.steps(loader, epochs=options.epochs):
        optimizer.zero_grad()
        total, weights = torch.zeros((), device=ctx.device), 0.0
        for (inputs, targets), weight in ctx.micro_batches(
            batch, max_samples=options.micro_batch_size
        ):
            with autocast(ctx, options):
                loss = cross_entropy(model(inputs.to(ctx.device)), targets.to(ctx.device))
            scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
            total, weights = total + loss.detach() * weight, weights + weight
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        ctx.report(loss=total / weights, gradient_norm=norm, loss_scale=scaler.get_scale())
    return {
        "num_classes": len(classes),
        "classes": json.dumps(classes),
        "mean": json.dumps(MEAN),
        "std": json.dumps(STD),
    }


@torch.no_grad()
def evaluate(ctx: RankContext) -> Report:
    """Score the trained model on the held-out images: the report has the confusion matrix."""
    options = read_options(Options, ctx.options)
    classes, dataset = images_of(ctx, "test")
    net = make_net(options.model_copy(update={"weights": None}), len(classes)).to(ctx.device)
    ctx.track(model=net)
    net.eval()
    meter = ClassificationMeter(classes)
    for inputs, targets in ctx.loader(
        dataset, global_batch_size=256, shuffle=False, num_workers=options.num_workers
    ):
        with autocast(ctx, options):
            logits = net(inputs.to(ctx.device))
        meter.update(logits.float(), targets, images=inputs)
    return meter.report()


def images_of(
    ctx: RankContext, split: str, augment: Sequence[nn.Module] = ()
) -> tuple[list[str], Subset[Any]]:
    """Return the classes, and a split's images: float32 [3, size, size], normalised."""
    options = read_options(Options, ctx.options)
    numbers = json.loads((ctx.data / "split.json").read_text(encoding="utf-8"))
    transform = v2.Compose([v2.Resize((options.size, options.size)), *augment, *TO_TENSOR])
    found = image_folder(ctx.source, transform, index=ctx.data, cache=options.cache)
    return numbers["classes"], Subset(found, numbers[split])


def autocast(ctx: RankContext, options: Options) -> torch.autocast:
    """Compute in the precision that was chosen, if that is safe."""
    return torch.autocast(
        ctx.device.type, getattr(torch, options.precision), enabled=options.precision != "float32"
    )


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """Make the optimizer that was chosen."""
    given: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=options.momentum, **given)
    return torch.optim.AdamW(model.parameters(), **given)


def make_net(options: Options, num_classes: int) -> nn.Module:
    """Make the model for so many classes, with the weights that fit.

    Raises:
        InvalidParamsError: there is no such model, or the weights are another one's.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if options.model not in known:
        msg = (
            f"model is {options.model!r}, which is no classifier of torchvision; "
            f"there are {', '.join(known)}"
        )
        raise InvalidParamsError(msg)
    has_heads = options.model in WITH_AUXILIARY_HEADS
    one_head = {"aux_logits": False, "init_weights": True} if has_heads else {}
    net: nn.Module = torchvision.models.get_model(
        options.model, weights=None, num_classes=num_classes, **one_head
    )
    if options.weights is not None:
        load_fitting(net, options.weights, options.model)
    return net


def load_fitting(net: nn.Module, weights: str, model: str) -> None:
    """Load all weights but the last layer's, which may be of other classes."""
    folder, slash, file = weights.rpartition("/")
    given = safetensors.torch.load(storage_from_uri(folder or slash or ".").read(file))
    own = net.state_dict()
    shapes = {name: value.shape for name, value in own.items()}
    fitting = {name: value for name, value in given.items() if shapes.get(name) == value.shape}
    if len(fitting) < len(own) - 2:  # the last layer has a weight and a bias
        msg = (
            f"{weights} has {len(fitting)} of the {len(own)} tensors of {model}; "
            "give that model's weights"
        )
        raise InvalidParamsError(msg)
    net.load_state_dict(fitting, strict=False)
