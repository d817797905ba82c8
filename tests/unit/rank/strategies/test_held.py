"""Shows when a training is warned that an optimizer used gradients that a checkpoint lacks."""

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prefect_torch_ddp import CheckpointParams, RankContext

EVERY_STEP = CheckpointParams(every_steps=1, every_s=None)
WARNING = "such gradients aren't in checkpoints"

Loop = Callable[[RankContext], Iterator[int]]


def in_steps(ctx: RankContext) -> Iterator[int]:
    """Yield six steps of `ctx.steps`."""
    yield from ctx.steps(total=6)


def in_own_loop(ctx: RankContext) -> Iterator[int]:
    """Yield six steps of a loop of the user's own, each with a checkpoint."""
    for step in range(1, 7):
        yield step
        ctx.checkpoint(force=True)


class Parts:
    """A small model with its optimizer, tracked."""

    def __init__(self, ctx: RankContext, **options: Any) -> None:
        """Track them."""
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **options)
        ctx.track(model=self.model, optimizer=self.optimizer)

    def backward(self) -> torch.Tensor:
        """Add to the gradients."""
        loss: torch.Tensor = self.model(torch.ones(4, 2)).square().mean()
        loss.backward()
        return loss


def accumulates(ctx: RankContext, loop: Loop) -> None:
    """Step after each third backward pass."""
    parts = Parts(ctx)
    for step in loop(ctx):
        parts.backward()
        if step % 3 == 0:
            parts.optimizer.step()
            parts.optimizer.zero_grad(set_to_none=step % 2 == 0)


def accumulates_scaled(ctx: RankContext, loop: Loop) -> None:
    """Clip what was accumulated."""
    parts = Parts(ctx)
    for step in loop(ctx):
        parts.backward()
        if step % 2 == 0:
            nn.utils.clip_grad_norm_(parts.model.parameters(), 1e-3)
            parts.optimizer.step()
            parts.optimizer.zero_grad()


def steps_late(ctx: RankContext, loop: Loop) -> None:
    """Use the gradients of the step before."""
    parts = Parts(ctx)
    for _ in loop(ctx):
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        parts.backward()


def never_clears(ctx: RankContext, loop: Loop) -> None:
    """Let gradients fade instead of setting them to zero."""
    parts = Parts(ctx)
    for _ in loop(ctx):
        parts.backward()
        parts.optimizer.step()
        for parameter in parts.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


@pytest.mark.parametrize("loop", [in_steps, in_own_loop])
@pytest.mark.parametrize("train", [accumulates, accumulates_scaled, steps_late, never_clears])
def test_gradients_that_a_checkpoint_lacks_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train: Any, loop: Loop
) -> None:
    """If an optimizer used them after the checkpoint; the warning names the way."""
    with RankContext.local(storage=tmp_path, checkpoint=EVERY_STEP) as ctx:
        train(ctx, loop)
    assert caplog.text.count(WARNING) == 1
    assert "ctx.micro_batches" in caplog.text
    assert "'optimizer'" in caplog.text


def test_gradients_that_no_checkpoint_cuts_are_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If checkpoints come only after the optimizer's steps, nothing is missing in them."""
    policy = CheckpointParams(every_steps=3, every_s=None)
    with RankContext.local(storage=tmp_path, checkpoint=policy) as ctx:
        accumulates(ctx, in_steps)
    assert not caplog.text


def clears_first(ctx: RankContext, loop: Loop) -> None:
    """Leave the gradients that were used to the next step, as most programs do."""
    parts = Parts(ctx)
    for step in loop(ctx):
        parts.optimizer.zero_grad(set_to_none=step % 2 == 0)
        parts.backward()
        parts.backward()
        parts.optimizer.step()


def clears_in_place(ctx: RankContext, loop: Loop) -> None:
    """Keep the gradients' tensors."""
    parts = Parts(ctx)
    for _ in loop(ctx):
        parts.model.zero_grad(set_to_none=False)
        parts.backward()
        parts.optimizer.step()


def clears_last(ctx: RankContext, loop: Loop) -> None:
    """Leave zeros, or nothing, to the next step."""
    parts = Parts(ctx)
    for step in loop(ctx):
        parts.backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=step % 2 == 0)


def alternates(ctx: RankContext, loop: Loop) -> None:
    """Train the critic and, every other step, the generator, whose passes reach the critic."""
    critic, generator = nn.Linear(2, 1), nn.Linear(1, 2)
    parts = nn.ModuleDict({"critic": critic, "generator": generator})
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1, momentum=0.9)
    ctx.track(parts=parts, of_critic=of_critic, of_generator=of_generator)
    noise = torch.ones(3, 1)
    for step in loop(ctx):
        if step % 3 != 1:  # twice in a row
            of_generator.zero_grad(set_to_none=False)
            critic(generator(noise)).mean().backward()
            of_generator.step()
        else:
            of_critic.zero_grad(set_to_none=False)
            critic(generator(noise)).square().mean().backward()
            of_critic.step()


def skips(ctx: RankContext, loop: Loop) -> None:
    """Have a GradScaler leave out the optimizer's step whenever a gradient isn't finite."""
    parts, scaler = Parts(ctx), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in loop(ctx):
        parts.optimizer.zero_grad(set_to_none=step % 2 == 0)
        factor = float("inf") if step % 3 == 0 else 1.0
        loss = parts.model(torch.ones(4, 2)).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(parts.optimizer)
        scaler.update()


def freezes(ctx: RankContext, loop: Loop) -> None:
    """Freeze the bias in the middle, and train it again."""
    parts = Parts(ctx)
    for step in loop(ctx):
        parts.model.bias.requires_grad_(step not in (3, 4))
        parts.optimizer.zero_grad(set_to_none=False)
        parts.backward()
        parts.optimizer.step()


def overwrites(ctx: RankContext, loop: Loop) -> None:
    """Write gradients of its own into the same tensors."""
    parts = Parts(ctx)
    for parameter in parts.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in loop(ctx):
        loss = parts.model(torch.ones(4, 2)).square().mean()
        found = torch.autograd.grad(loss, list(parts.model.parameters()))
        for parameter, gradient in zip(parts.model.parameters(), found, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)
        parts.optimizer.step()


def searches(ctx: RankContext, loop: Loop) -> None:
    """Have LBFGS call its closure, which clears the gradients."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    ctx.track(model=model, optimizer=optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: torch.Tensor = (model(torch.ones(4, 2)) - 1).square().mean()
        loss.backward()
        return loss

    for _ in loop(ctx):
        optimizer.step(closure)


def averages(ctx: RankContext, loop: Loop) -> None:
    """Copy the model and its optimizer in each step, and save the model whole."""
    parts = Parts(ctx)
    for _ in loop(ctx):
        torch.save(parts.model, io.BytesIO())
        copied, stepped = copy.deepcopy((parts.model, parts.optimizer))
        copied(torch.ones(4, 2)).sum().backward()
        stepped.step()
        parts.optimizer.zero_grad()
        parts.backward()
        parts.optimizer.step()


ORDINARY = [
    *[clears_first, clears_in_place, clears_last, alternates, skips],
    *[freezes, overwrites, searches, averages],
]


@pytest.mark.parametrize("loop", [in_steps, in_own_loop])
@pytest.mark.parametrize("train", ORDINARY)
def test_programs_that_accumulate_nothing_are_not_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, train: Any, loop: Loop
) -> None:
    """However they clear, skip, freeze or write gradients."""
    with RankContext.local(storage=tmp_path, checkpoint=EVERY_STEP) as ctx:
        train(ctx, loop)
    assert WARNING not in caplog.text
