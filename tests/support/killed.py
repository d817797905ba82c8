"""A training that a rank may not survive, and what has to be true after it was resumed."""

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.records.ledger import read_ledger
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.ranks import Died, config_for, train_on


def train_or_die(
    ctx: RankContext,
    loader: Any,
    net: torch.nn.Module,
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor],
    kill_at: int | None,
) -> dict[str, Any]:
    """Train a small net for two epochs; rank 1, or the only one, dies in a step.

    Args:
        ctx: of the rank.
        loader: of its batches.
        net: its weights are equal on all ranks.
        loss_of: returns the mean loss of the wrapped net on a micro-batch.
        kill_at: the step before whose update the rank dies; None: it lives.

    Returns:
        The last `step`, and the `sha256` of the weights.
    """
    model = ctx.wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    for batch in ctx.steps(loader, epochs=2):
        optimizer.zero_grad()
        for piece, weight in ctx.micro_batches(batch):
            (loss_of(model, piece) * weight).backward()
        if ctx.step == kill_at and ctx.rank == min(1, ctx.world_size - 1):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    state = b"".join(each.detach().numpy().tobytes() for each in net.parameters())
    return {"step": ctx.step, "sha256": hashlib.sha256(state).hexdigest()}


def check_killed_and_resumed(
    folder: Path, train: Callable[..., Any], calm: Any, struck: Any, kill_at: tuple[int, ...]
) -> int:
    """Kill two ranks of `train(ctx, where, kill_at)` in these steps; return the last step.

    The resumed training ends as an undisturbed one does, and its ledger is clean.

    Args:
        folder: for the runs.
        train: returns what `train_or_die` does.
        calm: where the undisturbed training reads.
        struck: where the other one reads.
        kill_at: the steps.
    """
    undisturbed = train_on(2, config_for(folder / "calm", ledger=True), train, calm, None)
    for step in kill_at:
        values = train_on(2, config_for(folder / "runs", ledger=True), train, struck, step)
        assert any(isinstance(value, Died) for value in values)
    ended = train_on(2, config_for(folder / "runs", ledger=True), train, struck, None)
    assert ended == undisturbed
    calm_ledger, ledger = (
        read_ledger(DirectoryStorage(folder / name), "run") for name in ("calm", "runs")
    )
    assert ledger.is_clean
    assert str(ledger) == str(calm_ledger)
    return int(ended[0]["step"])
