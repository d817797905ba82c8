"""Ordinary trainings whose ranks have allowed differences run undisturbed."""

import logging
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from tests.support.ranks import config_for, train_on
from tests.support.tracked import Tracked

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.timeout(120)

GUARDS = (
    "prefect_torch_ddp.checkpoint.state.comparison",
    "prefect_torch_ddp.checkpoint.checkpointer",
)


class Training:
    """A training whose parts its kinds replace."""

    def __init__(self, ctx: RankContext) -> None:
        torch.manual_seed(ctx.rank)  # DDP makes the weights the same
        self.ctx = ctx
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.net = nn.Sequential(self.body, nn.Dropout(0.2), nn.Linear(8, 1))
        self.make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
        self.tracked: dict[str, Any] = {}
        self.after: Callable[[float], Any] = lambda _loss: None
        self.size, self.max_samples = 9, 8
        self.autocasts = False
        self.scaler: Any = None
        self.wrap = ctx.wrap

    def run(self) -> tuple[int, list[float], list[str]]:
        """Train; return the last step, the weights, and what the comparison warned of."""
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        for name in GUARDS:
            logging.getLogger(name).addHandler(handler)
        ctx, model = self.ctx, self.wrap(self.net)
        trained = [each for each in self.net.parameters() if each.requires_grad]
        optimizer = self.make_optimizer(trained, lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
        ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, **self.tracked)
        x = torch.linspace(-1, 1, 160).reshape(40, 4)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        for batch in ctx.steps(ctx.loader(data, global_batch_size=self.size), epochs=2):
            optimizer.zero_grad()
            loss = 0.0
            for (inputs, targets), weight in ctx.micro_batches(batch, max_samples=self.max_samples):
                with torch.autocast("cpu", enabled=self.autocasts):
                    each = nn.functional.mse_loss(model(inputs), targets)
                scaled = each if self.scaler is None else self.scaler.scale(each)
                (scaled * weight).backward()
                loss += each.item() * weight
            if self.scaler is not None:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained, 1.0)
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
                self.scaler.update()
            scheduler.step()
            self.after(loss)
        return ctx.step, [each.sum().item() for each in self.net.parameters()], said


def plainly(training: Training) -> None:
    """Batch norm, dropout, a clipped norm, uneven shares."""


def accumulating(training: Training) -> None:
    """Several micro-batches a step."""
    training.size, training.max_samples = 16, 4


def averaged(training: Training) -> None:
    """Averaged weights of every rank."""
    ema = torch.optim.swa_utils.AveragedModel(training.net, use_buffers=True)
    training.tracked = {"ema": ema}
    training.after = lambda _loss: ema.update_parameters(training.net)


def compiled(training: Training) -> None:
    """A compiled model."""
    training.wrap = lambda net: torch.compile(training.ctx.wrap(net), backend="eager")


def plain_ddp(training: Training) -> None:
    """Torch's own DDP, whose buffers each forward pass changes on each rank."""
    training.wrap = DistributedDataParallel


def own_buffers(training: Training) -> None:
    """Running statistics of each rank's own samples, by choice."""
    training.wrap = lambda net: training.ctx.wrap(net, broadcast_buffers=False)


def frozen(training: Training) -> None:
    """A frozen body in eval mode."""
    training.body.requires_grad_(requires_grad=False).eval()


def scaled(training: Training) -> None:
    """A gradient scaler, and bfloat16."""
    training.scaler, training.autocasts = torch.amp.GradScaler("cpu", init_scale=64.0), True
    training.tracked = {"scaler": training.scaler}


def timed(training: Training) -> None:
    """A state with times and a running loss, which differ by rank."""
    state = Tracked({"begun_s": time.monotonic(), "losses": [0.0], "num_steps": 0})
    training.tracked = {"state": state}

    def after(loss: float) -> None:
        state.value["losses"] = [0.9 * state.value["losses"][0] + loss]
        state.value["num_steps"] += 1

    training.after = after


def history(training: Training) -> None:
    """A history that only rank 0 keeps."""
    kept = Tracked([])
    training.tracked = {"history": kept}

    def after(loss: float) -> None:
        if training.ctx.rank == 0:
            kept.value.append({"step": training.ctx.step, "loss": loss, "weights": torch.ones(2)})

    training.after = after


def validated(training: Training) -> None:
    """Only rank 0 validates, in eval mode, with what ctx.wrap returned, and draws numbers."""

    def after(_loss: float) -> None:
        if training.ctx.rank == 0:
            training.net.eval()(torch.rand(5, 4))
            training.net.train()
            random.random()

    training.after = after


def numbers_in_the_optimizer(training: Training) -> None:
    """An optimizer whose state holds numbers, lists and flags."""
    training.make_optimizer = torch.optim.NAdam


def shared_positions(training: Training) -> None:
    """A tracked iterator that is as far on every rank; and each rank's own by track_each."""
    shared, own = Tracked(0), Tracked({"at": training.ctx.rank, "next": torch.rand(2)})
    training.tracked = {"shared": shared}
    training.ctx.track_each(own=own)

    def after(_loss: float) -> None:
        shared.value += 1
        own.value["at"] += 2

    training.after = after


KINDS = {
    kind.__name__.replace("_", " "): kind
    for kind in (
        plainly,
        accumulating,
        averaged,
        compiled,
        plain_ddp,
        own_buffers,
        frozen,
        scaled,
        timed,
        history,
        validated,
        numbers_in_the_optimizer,
        shared_positions,
    )
}


def train(ctx: RankContext, kind: str) -> tuple[int, list[float], list[str]]:
    """Train in that way."""
    training = Training(ctx)
    KINDS[kind](training)
    return training.run()


LONGER = {"compiled": pytest.mark.extended}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=LONGER.get(kind, ())) for kind in KINDS])
def test_a_healthy_training_is_let_alone(tmp_path: Path, kind: str) -> None:
    """All its checkpoints exist, the weights are equal, and only differing floats cause one
    warning."""
    config = config_for(tmp_path, every_steps=3)
    (num_steps, first, said), (_, second, _) = train_on(2, config, train, kind)
    assert list_manifests(config.storage, "run")[-1].step == num_steps
    assert first == second
    if kind == "timed":
        said = [text for text in said if not text.startswith("the state of the tracked object")]
    assert said == []
