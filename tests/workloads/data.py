"""Workloads over images, wherever they are, and one of ours with a rank that is killed."""

import os
import signal
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from flows import cifar10
from prefect_torch_ddp import RankContext, Report, image_folder, write_index
from prefect_torch_ddp.rank.evaluation.classification import ClassificationMeter
from tests.workloads import descend, wait_for_checkpoint
from tests.workloads.tiny import fail_if_told

SIZE = 8
KILL_AT = 5


def _train(ctx: RankContext, dataset: Any, num_inputs: int, size: int, epochs: int) -> Any:
    torch.manual_seed(ctx.seed)
    model = ctx.wrap(torch.nn.Linear(num_inputs, len(dataset.classes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ctx.track(model=model, optimizer=optimizer)
    loader = ctx.loader(dataset, global_batch_size=size, num_workers=1)
    for inputs, labels in ctx.steps(loader, epochs=epochs):
        fail_if_told(ctx)
        descend(ctx, optimizer, cross_entropy(model(inputs), labels))
    return model


@torch.no_grad()
def _evaluate(ctx: RankContext, dataset: Any, num_inputs: int) -> Report:
    model = torch.nn.Linear(num_inputs, len(dataset.classes))
    ctx.track(model=model)
    meter = ClassificationMeter(dataset.classes)
    for inputs, labels in ctx.loader(dataset, global_batch_size=16, shuffle=False):
        meter.update(model(inputs), labels)
    return meter.report()


class Indexed:
    """Reads the raw data in place, from its index."""

    @staticmethod
    def prepare(ctx: RankContext) -> None:
        print(f"indexed {write_index(ctx.source, ctx.data)} objects")

    @staticmethod
    def train(ctx: RankContext) -> dict[str, Any]:
        dataset: Any = _images(ctx)
        print(f"reads a {type(dataset).__name__} of {len(dataset)} images")
        model = _train(ctx, dataset, 3 * SIZE * SIZE, 8, 3)
        return {"weight": float(sum(p.detach().double().sum() for p in model.parameters()))}

    @staticmethod
    def evaluate(ctx: RankContext) -> Report:
        return _evaluate(ctx, _images(ctx), 3 * SIZE * SIZE)


def _images(ctx: RankContext) -> Dataset[Any]:
    return image_folder(ctx.source, _to_tensor, index=ctx.data)


def _to_tensor(image: Image.Image) -> torch.Tensor:
    small = np.asarray(image.resize((SIZE, SIZE)), dtype=np.float32)
    return torch.from_numpy(small / 255).flatten()


class KilledCifar10:
    """The workload flows.cifar10 whose rank 1 is killed in attempt 1, at the step KILL_AT, once a
    checkpoint is there."""

    prepare, evaluate = staticmethod(cifar10.prepare), staticmethod(cifar10.evaluate)

    @staticmethod
    def train(ctx: RankContext) -> dict[str, float | None]:
        """Train as it does; rank 1 doesn't outlive what it reports of the step."""
        report = ctx.report

        def report_and_die(**metrics: Any) -> None:
            report(**metrics)
            if (ctx.attempt, ctx.rank, ctx.step) == (1, 1, KILL_AT):
                wait_for_checkpoint(ctx, KILL_AT)
                os.kill(os.getpid(), signal.SIGKILL)

        ctx.report = report_and_die  # type: ignore[method-assign]
        return cifar10.train(ctx)
