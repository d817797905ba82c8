"""Trainings that are killed at the points of a plan, with ctx.steps and in their own loop."""

import hashlib
import json
import random
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.storage.s3 import storage as s3_storage
from tests.support.killing_storage import InTraining, Kill, comes_by, die
from tests.support.tracked import Tracked
from tests.workloads.healthy import points

NUM_SAMPLES, BATCH, EPOCHS = 33, 8, 3
"""Four full batches and a tail of one sample, fewer than ranks."""
NUM_STEPS = 15
SAVE_EVERY = 2
BIG_PART_BYTES = 5 * 2**20
BIG_BALLAST = 11 * 2**17
"""Numbers of 8 bytes: 11 MiB, three parts of an upload."""


@dataclass(frozen=True)
class Plan:
    """How the training runs, and at which point it is killed."""

    folder: str
    """For the ledger, and for a mark of each kill that was carried out."""
    kills: tuple[Kill, ...] = ()
    accumulates: bool = False
    num_workers: int = 0
    is_elastic: bool = False
    """Nothing in it depends on the number of ranks: no dropout, no buffers, no noise."""
    virtual_ranks: int | None = None
    """With determinism="elastic": the same bits for any number of ranks, with dropout."""
    in_own_loop: bool = False
    """Without ctx.steps."""
    is_big: bool = False
    """Its checkpoints are uploaded to S3 in parts."""


class Executioner:
    """Kills this process at the point of the plan."""

    def __init__(self, plan: Plan, attempt: int) -> None:
        self._plan = plan
        self._kills = [kill for kill in plan.kills if kill.attempt == attempt]
        self._timers: list[threading.Timer] = []

    def pass_by(self, place: InTraining, step: int | None = None) -> None:
        for kill in self._kills:
            if kill.place == place and kill.step in (None, step) and comes_by(kill):
                if place != "timer":
                    die(self._plan.folder, kill.attempt)
                timer = threading.Timer(kill.delay_s, die, (self._plan.folder, kill.attempt))
                timer.start()
                self._timers.append(timer)

    def wait(self) -> None:
        """Wait for timers that have begun: each of them kills."""
        for timer in self._timers:
            timer.join()


class Samples:
    """Points with their numbers; noise is drawn for each, and a DataLoader's worker may be
    killed at one."""

    def __init__(self, plan: Plan, executioner: Executioner) -> None:
        self._inputs, self._targets = points(NUM_SAMPLES)
        self._is_noisy = not plan.is_elastic
        self._executioner = executioner

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        if torch.utils.data.get_worker_info() is not None:
            self._executioner.pass_by("data_worker")
        noise = 0.1 * torch.randn(4, dtype=torch.float64) if self._is_noisy else 0.0
        return number, self._inputs[number] + noise, self._targets[number]


class Ballast:
    """Something tracked that changes with every step, and is passed by when it is saved and
    restored."""

    def __init__(self, num: int, executioner: Executioner) -> None:
        self.values = torch.arange(num, dtype=torch.float64)
        self._executioner = executioner

    def step(self, number: int) -> None:
        self.values.mul_(0.9).add_(number)

    def state_dict(self) -> dict[str, Any]:
        self._executioner.pass_by("staging")
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._executioner.pass_by("restoring")
        self.values.copy_(state["values"])


def train(ctx: RankContext, plan: Plan) -> dict[str, Any]:
    """Train, write down which samples were in which step, and say what everything tracked
    hashes to."""
    _die_of_long_writes()
    if plan.is_big:
        s3_storage.MULTIPART_FROM_BYTES = s3_storage.PART_BYTES = BIG_PART_BYTES
    executioner = Executioner(plan, ctx.attempt)
    bare = _make_net(plan)
    model = ctx.wrap(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    ballast = Ballast(BIG_BALLAST if plan.is_big else 50, executioner)
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler, ballast=ballast)
    executioner.pass_by("tracked")
    loader = ctx.loader(
        Samples(plan, executioner), global_batch_size=BATCH, num_workers=plan.num_workers
    )
    with Path(plan.folder, f"ledger-{ctx.attempt}-{ctx.rank}.jsonl").open(
        "a", buffering=1
    ) as ledger:
        for batch in ctx.steps(loader, epochs=EPOCHS):
            executioner.pass_by("begin", ctx.step)
            executioner.pass_by("timer", ctx.step)
            optimizer.zero_grad()
            loss, numbers = _backward(
                ctx, model, batch, plan, lambda: executioner.pass_by("micro_batch", ctx.step)
            )
            executioner.pass_by("backward", ctx.step)
            optimizer.step()
            scheduler.step()
            ballast.step(ctx.step)
            counted = numbers[: ctx._progress.share.num_local]  # none of a stand-in
            line = {"step": ctx.step, "epoch": ctx.epoch, "attempt": ctx.attempt}
            ledger.write(json.dumps(line | {"samples": counted}) + "\n")
            ctx.report(loss=loss)
            executioner.pass_by("end", ctx.step)
    executioner.wait()
    executioner.pass_by("left")
    return {
        "attempt": ctx.attempt,
        "step": ctx.step,
        "sha256_of_parameters": _sha256(dict(bare.named_parameters())),
        "sha256": _sha256(
            [bare.state_dict(), optimizer.state_dict(), scheduler.state_dict(), ballast.values]
        ),
    }


class Centre(nn.Module):
    """A layer with a buffer that depends on the batches of rank 0, also on those of one sample,
    as BatchNorm's can't."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(dim=0), 0.1)
        return x - self.mean


def _make_net(plan: Plan) -> Any:
    own = [] if plan.is_elastic else [Centre(16)]
    own += [] if plan.is_elastic and plan.virtual_ranks is None else [nn.Dropout(0.25)]
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), *own, nn.Linear(16, 3)).double()


def _backward(
    ctx: RankContext, model: Any, batch: Any, plan: Plan, between: Callable[[], None]
) -> tuple[torch.Tensor, list[int]]:
    """Run the backward pass, whole or sample by sample; return the mean loss, and the numbers
    of the samples.

    Args:
        ctx: the context.
        model: wrapped.
        batch: numbers, inputs and targets.
        plan: of the training.
        between: called after each micro-batch.
    """
    scale = 1.0
    if not plan.is_elastic:  # every generator has a part in the result
        scale += 0.1 * random.random() + 0.1 * float(np.random.random())
    total, seen = torch.zeros((), dtype=torch.float64), []
    for (numbers, inputs, targets), weight in ctx.micro_batches(
        batch, max_samples=1 if plan.accumulates else None
    ):
        loss = cross_entropy(scale * model(inputs), targets)
        (loss * weight).backward()
        total += loss.detach() * len(inputs)
        seen += numbers.tolist()
        between()
    return total / len(seen), seen


def _die_of_long_writes() -> None:
    """Without a core dump; Python ignores SIGXFSZ, and a write beyond the limit would be an
    OSError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)


def _sha256(state: Any) -> str:
    digest = hashlib.sha256()
    for part in _parts(state):
        digest.update(part)
    return digest.hexdigest()


def _parts(state: Any) -> Iterator[bytes]:
    """Yield a nest of states as bytes, in a fixed order."""
    if isinstance(state, torch.Tensor):
        yield state.detach().cpu().contiguous().numpy().tobytes()
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield str(key).encode()
            yield from _parts(state[key])
    elif isinstance(state, list | tuple):
        for item in state:
            yield from _parts(item)
    else:
        yield repr(state).encode()


# ---- In a loop of its own, without ctx.steps.

NUM_ROUNDS = 9
"""Not a multiple of SAVE_EVERY: the last round has no checkpoint of its own."""


def train_in_own_loop(ctx: RankContext, plan: Plan) -> dict[str, Any]:
    """Train with passes of the loader, and noise and dropout from the global generators;
    return the hash of everything tracked."""
    _die_of_long_writes()
    executioner = Executioner(plan, ctx.attempt)
    torch.manual_seed(3)
    bare = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)).double()
    torch.manual_seed(100 + ctx.rank)
    model = ctx.wrap(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    samples = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(12, 4)
    loader = ctx.loader(torch.utils.data.TensorDataset(samples), global_batch_size=4)
    done = Tracked(0)  # how far the loop is, as user code keeps it
    ctx.track(model=model, optimizer=optimizer, done=done)
    executioner.pass_by("tracked")
    while done.value < NUM_ROUNDS:
        executioner.pass_by("begin", done.value + 1)
        optimizer.zero_grad()
        loader.epoch = done.value
        inputs = torch.cat([x for (x,) in loader])
        loss = model(inputs + torch.randn(6, 4, dtype=torch.float64)).square().mean()
        loss.backward()
        executioner.pass_by("backward", done.value + 1)
        optimizer.step()
        ctx.report(loss=loss)
        done.value += 1
        if done.value % SAVE_EVERY == 0:
            ctx.checkpoint(force=True)
        executioner.pass_by("end", done.value)
    digest = _sha256([bare.state_dict(), optimizer.state_dict()])
    return {"attempt": ctx.attempt, "sha256": digest}
