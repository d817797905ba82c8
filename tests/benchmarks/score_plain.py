"""The example workloads' trainings in one process, by torch alone: the same nets, optimizers,
schedules and augmentation, with a DataLoader and no checkpoint."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Dataset

from flows import cifar10, land_use, pet_names
from prefect_torch_ddp import RankContext, read_options


@dataclass
class Plain:
    """What a training consists of, and what it is scored on."""

    net: nn.Module
    train: Dataset[Any]
    test: Dataset[Any]
    options: Any
    optimizer: torch.optim.Optimizer
    loss: Callable[[nn.Module, list[Tensor]], Tensor]
    hits: Callable[[nn.Module, list[Tensor]], Tensor]
    """Bool, for each prediction of a batch."""
    is_clipped: bool = True

    def fit(self) -> float:
        """Train; return the accuracy."""
        loader = DataLoader(self.train, self.options.global_batch_size, shuffle=True)
        scheduler = self.scheduler(self.options.epochs * len(loader))
        for _ in range(self.options.epochs):
            for batch in loader:
                self.optimizer.zero_grad()
                self.loss(self.net, batch).backward()
                if self.is_clipped:
                    clip_grad_norm_(self.net.parameters(), 1.0)
                self.optimizer.step()
                scheduler.step()
        self.net.eval()
        with torch.no_grad():
            hits = [self.hits(self.net, batch) for batch in DataLoader(self.test, 256)]
        return torch.cat(hits).double().mean().item()

    def scheduler(self, num_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the workload's schedule of the learning rate."""
        if isinstance(self.options, pet_names.Options):
            return torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, num_steps)
        cycles = getattr(self.options, "optimizer", "adamw") == "adamw"
        return torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, self.options.lr, total_steps=num_steps, cycle_momentum=cycles
        )


def of_pet_names(ctx: RankContext) -> Plain:
    """Return that of flows.pet_names."""
    options = read_options(pet_names.Options, ctx.options)
    data = json.loads((ctx.data / "names.json").read_text(encoding="utf-8"))
    net = pet_names.make_net(options, len(data["alphabet"]))

    def loss(net: nn.Module, batch: list[Tensor]) -> Tensor:
        given, wanted = batch
        losses = cross_entropy(
            net(given)[0].mT, wanted, ignore_index=pet_names.NO_LETTER, reduction="none"
        )
        return (losses.sum(1) / (wanted != pet_names.NO_LETTER).sum(1)).mean()

    def hits(net: nn.Module, batch: list[Tensor]) -> Tensor:
        given, wanted = batch
        is_letter = wanted != pet_names.NO_LETTER
        logits: Tensor = net(given)[0]
        return logits[is_letter].argmax(1) == wanted[is_letter]

    train, test = (pet_names.letters(data[split], data["alphabet"]) for split in ("train", "test"))
    optimizer = torch.optim.AdamW(net.parameters(), options.lr)
    return Plain(net, train, test, options, optimizer, loss, hits)


def of_land_use(ctx: RankContext) -> Plain:
    """Return that of flows.land_use."""
    options = read_options(land_use.Options, ctx.options)
    classes, train = land_use.images_of(ctx, "train", land_use.TURN)
    net = land_use.make_net(options, len(classes))
    test = land_use.images_of(ctx, "test")[1]
    optimizer = land_use.make_optimizer(net, options)
    return Plain(net, train, test, options, optimizer, classes_loss(), classes_hits)


def of_cifar10(ctx: RankContext) -> Plain:
    """Return that of flows.cifar10."""
    options = read_options(cifar10.Options, ctx.options)
    net = cifar10.make_net()
    chosen: dict[str, Any] = {"weight_decay": options.weight_decay, "nesterov": True}
    return Plain(
        net,
        cifar10.Images(ctx, "train", augmented=True),
        cifar10.Images(ctx, "test"),
        options,
        torch.optim.SGD(net.parameters(), options.lr, momentum=0.9, **chosen),
        classes_loss(label_smoothing=0.1),
        classes_hits,
        is_clipped=False,
    )


def classes_loss(**chosen: Any) -> Callable[[nn.Module, list[Tensor]], Tensor]:
    """Return the loss of a batch of images and their classes."""
    return lambda net, batch: cross_entropy(net(batch[0]), batch[1], **chosen)


def classes_hits(net: nn.Module, batch: list[Tensor]) -> Tensor:
    """Tell whose class is predicted."""
    logits: Tensor = net(batch[0])
    return logits.argmax(1) == batch[1]
