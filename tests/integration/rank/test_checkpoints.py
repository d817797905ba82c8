"""Checkpoints that one of several ranks asks for alone, or that another number of them reads."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint import rank_store
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from tests.support.ranks import config_for, train_on


def on_rank_0_alone(ctx: RankContext, where: str) -> None:
    """Ask for a checkpoint as scripts for torchrun do; all ranks wait for each other in each
    step."""
    rank_store.ABSENT_S = 0.5
    model = ctx.wrap(nn.Linear(1, 1))
    if ctx.rank == 0 or where != "ctx.track":
        ctx.track(model=model, other=nn.Linear(1, 1))
    for _ in range(2):
        for (x,) in ctx.steps(
            ctx.loader(TensorDataset(torch.ones(12, 1)), global_batch_size=4), epochs=1
        ):
            model(x).sum().backward()
            if ctx.rank == 0 and ctx.epoch_ended and where == "in a step":
                ctx.checkpoint(force=True)
        if ctx.rank == 0 and where == "between loops":
            ctx.checkpoint(force=True)


@pytest.mark.parametrize("where", ["in a step", "between loops", "ctx.track"])
def test_a_checkpoint_that_one_rank_asks_for_alone_is_an_error(tmp_path: Path, where: str) -> None:
    """Not a hang: it can't be complete, and none is put together of two steps; the error says
    that tracking belongs on every rank too."""
    config = config_for(tmp_path, None)
    with pytest.raises(
        AssertionError, match=r"InvalidParamsError: rank 1 took no part in .*; call ctx.track"
    ):
        train_on(2, config, on_rank_0_alone, where)
    assert list_manifests(config.storage, "run") == []
