"""The digits as a workload that notes when each step was done; see bench_job."""

import json
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from prefect_torch_ddp import RankContext, Report, read_options
from prefect_torch_ddp.examples import digits


class Options(digits.Options):
    """Those of the digits, and where rank 0 writes the times."""

    times: str = ""


def prepare(ctx: RankContext) -> None:
    """Prepare the digits."""
    digits.prepare(ctx)


def evaluate(ctx: RankContext) -> Report:
    """Evaluate the digits."""
    return digits.evaluate(ctx)


def train(ctx: RankContext) -> None:
    """Train as the digits do, noting the time after each step and its validation."""
    options = read_options(Options, ctx.options)
    net = digits.DigitNet(options.dropout)
    model = ctx.wrap(net)
    images = digits.images_of(ctx.data / "train")
    loader = ctx.loader(images, global_batch_size=options.global_batch_size)
    held_out = digits.images_of(ctx.data / "val")
    validation = ctx.loader(held_out, global_batch_size=256, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=options.weight_decay)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.epochs * len(loader)
    )
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler)
    times = [time.time()]
    for inputs, targets in ctx.steps(loader, epochs=options.epochs):
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ctx.report(loss=loss)
        if ctx.epoch_ended:
            scores = digits.score(ctx, net, validation)
            ctx.report(validation_accuracy=scores.accuracy, validation_loss=scores.loss)
        times.append(time.time())
    if ctx.rank == 0:
        Path(options.times).write_text(json.dumps(times))
