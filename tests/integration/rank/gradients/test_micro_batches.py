"""Gradient accumulation on real ranks: in mixed precision, and over kills in its midst."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from tests.support.ranks import Died, config_for, train_on
from tests.workloads import healthy


def left_half_way(ctx: RankContext) -> None:
    """Leave the micro-batches of step 2 after the first one."""
    model = ctx.wrap(nn.Linear(4, 3).double())
    for batch in ctx.steps(
        ctx.loader(TensorDataset(*healthy.points(12)), global_batch_size=6), epochs=1
    ):
        for (inputs, targets), weight in ctx.micro_batches(batch, max_samples=1):
            (nn.functional.cross_entropy(model(inputs), targets) * weight).backward()
            if ctx.step == 2:
                break


def test_micro_batches_left_half_way_are_an_error(tmp_path: Path) -> None:
    """Each rank would step by a gradient of its own otherwise."""
    says = r"step 2 left ctx\.micro_batches before the last micro-batch"
    with pytest.raises(AssertionError, match=says):
        train_on(2, config_for(tmp_path), left_half_way)


def fit(ctx: RankContext) -> dict[str, Any]:
    """Train with dropout and AdamW, where `scales` in mixed precision with a scale that grows,
    and falls in step 4.

    Options: scales; die_at (step), die_on (rank), die_number (of the micro-batch; None: behind
    the step).
    """
    options = ctx.options
    death = options.get("die_at"), options.get("die_on"), options.get("die_number")

    def die_if_due(number: int | None) -> None:
        if (ctx.step, ctx.rank, number) == death:
            healthy.die_after_checkpoint(ctx, (ctx.step - 1) // 2 * 2)

    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 3))
    model = ctx.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # No powers of two: bits depend on it.
    growth: dict[str, Any] = {"init_scale": 1000.0, "growth_factor": 1.7, "growth_interval": 2}
    scaler = torch.amp.GradScaler("cpu", enabled=options["scales"], **growth)
    ctx.track(model=model, optimizer=optimizer, scaler=scaler)
    inputs, targets = healthy.points(33)
    loader = ctx.loader(TensorDataset(inputs.float(), targets), global_batch_size=12)
    for batch in ctx.steps(loader, epochs=4):
        optimizer.zero_grad()
        for number, ((x, y), weight) in enumerate(ctx.micro_batches(batch, max_samples=2)):
            die_if_due(number)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options["scales"]):
                loss = nn.functional.cross_entropy(model(x), y)
            overflows = options["scales"] and ctx.step == 4
            scaler.scale(loss * weight * (float("inf") if overflows else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        die_if_due(None)
    digest = healthy.sha256_of_weights(net)
    return {"sha256": digest, "steps": ctx.step, "scaler": scaler.state_dict()}


def check_a_kill(folder: Path, world_size: int, scales: bool, death: tuple[Any, ...]) -> Any:
    """Killed and resumed, it ends as it does undisturbed; return that."""
    options = {"scales": scales}
    expected = train_on(world_size, config_for(folder / "whole", options=options), fit)
    options_of_death = options | dict(zip(("die_at", "die_on", "die_number"), death, strict=True))
    broken = config_for(folder / "broken", options=options_of_death)
    assert Died(-9) in train_on(world_size, broken, fit)
    assert train_on(world_size, config_for(folder / "broken", options=options), fit) == expected
    return expected


@pytest.mark.parametrize(("world_size", "die_at", "die_on"), [(1, 5, 0), (2, 3, 1)])
def test_a_kill_between_two_micro_batches(
    tmp_path: Path, world_size: int, die_at: int, die_on: int
) -> None:
    """SIGKILL in the midst of an accumulation, then a resume: every bit is that of the
    uninterrupted run."""
    check_a_kill(tmp_path, world_size, False, (die_at, die_on, 1))  # noqa: FBT003


@pytest.mark.parametrize(
    "death", [(3, 1, 1), (5, 0, None), (5, 1, 2)], ids=["grown", "fallen", "fallen-mid"]
)
def test_a_grad_scaler_over_a_kill(tmp_path: Path, death: tuple[int, int, int | None]) -> None:
    """In the midst of an epoch or an accumulation, behind an overflow: scale and bits are those
    of the undisturbed run."""
    (value, _) = check_a_kill(tmp_path, 2, True, death)  # noqa: FBT003
    assert value["scaler"]["scale"] not in (1000.0, 1700.0)
