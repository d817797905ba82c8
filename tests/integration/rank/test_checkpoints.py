"""Checkpoints that one of several ranks asks for alone, and draws that all share."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint import rank_store
from prefect_torch_ddp.checkpoint.attempts import claim_attempt
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.params import CheckpointParams
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.stages import run_with_context
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.ranks import run_ranks

EVERY_STEP = CheckpointParams(every_steps=1, every_s=None)
ON_DEMAND = CheckpointParams(every_s=None)


def on_rank_0_alone(ctx: RankContext) -> int:
    """Ask for a checkpoint as scripts for torchrun do; all ranks wait for each other in each
    step."""
    model = ctx.wrap(nn.Linear(1, 1))
    ctx.track(model=model)
    for (x,) in ctx.steps(
        ctx.loader(TensorDataset(torch.ones(12, 1)), global_batch_size=4), epochs=1
    ):
        model(x).sum().backward()
        if ctx.rank == 0 and ctx.epoch_ended:
            ctx.checkpoint(force=True)
    return ctx.step


def test_a_checkpoint_that_one_rank_asks_for_alone_hangs_nobody(tmp_path: Path) -> None:
    """It can't be complete, and the training's own last one is."""
    storage = DirectoryStorage(tmp_path)
    config = RankConfig("run", claim_attempt(storage, "run"), "task", storage, checkpoint=ON_DEMAND)
    assert run_ranks(run_with_context, 2, config, on_rank_0_alone, ()) == [3, 3]
    assert [manifest.step for manifest in list_manifests(storage, "run")] == [3]


def on_rank_0_alone_between_loops(ctx: RankContext) -> int:
    """Ask for a checkpoint behind a loop on rank 0 alone, then train on."""
    rank_store.ABSENT_S = 0.5
    model = ctx.wrap(nn.Linear(1, 1))
    ctx.track(model=model, other=nn.Linear(1, 1))
    for number in range(2):
        for (x,) in ctx.steps(
            ctx.loader(TensorDataset(torch.ones(12, 1)), global_batch_size=4), epochs=1
        ):
            model(x).sum().backward()
        if ctx.rank == 0 and number == 0:
            ctx.checkpoint(force=True)
            assert ctx._parts.tracker._checkpointer is not None
            ctx._parts.tracker._checkpointer.wait()
    return ctx.step


def test_a_checkpoint_that_one_rank_asks_for_between_loops_costs_that_one_alone(
    tmp_path: Path,
) -> None:
    """It can't be complete; the others, by all ranks, are made as usual, and none is put
    together of two steps."""
    storage = DirectoryStorage(tmp_path)
    config = RankConfig(
        "run", claim_attempt(storage, "run"), "task", storage, checkpoint=EVERY_STEP
    )
    assert run_ranks(run_with_context, 2, config, on_rank_0_alone_between_loops, ()) == [6, 6]
    assert [manifest.step for manifest in list_manifests(storage, "run")] == [5, 6]


def draws_after(ctx: RankContext, max_samples: int | None) -> Any:
    """Return what the step draws behind its micro-batches."""
    model = ctx.wrap(nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.5), nn.Linear(2, 1)))
    drawn = []
    loader = ctx.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=4)
    for batch in ctx.steps(loader, epochs=1):
        for (x,), weight in ctx.micro_batches(batch, max_samples=max_samples):
            (model(x).mean() * weight).backward()
        drawn.append(torch.rand(1).item())
    return drawn


def test_all_ranks_draw_alike_behind_elastic_micro_batches(tmp_path: Path) -> None:
    """Noise that an optimizer adds must not set the replicas apart, nor depend on their
    number."""

    def config(name: str) -> RankConfig:
        storage = DirectoryStorage(tmp_path / name)
        return RankConfig(
            "run",
            claim_attempt(storage, "run"),
            "task",
            storage,
            determinism="elastic",
            virtual_ranks=2,
        )

    on_two = run_ranks(run_with_context, 2, config("two"), draws_after, (1,))
    (on_one,) = run_ranks(run_with_context, 1, config("one"), draws_after, (None,))
    assert on_two == [on_one, on_one]
