"""Checkpoints that one of several ranks asks for alone, or that another number of them reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint import rank_store
from prefect_torch_ddp.checkpoint.export import export_models
from prefect_torch_ddp.checkpoint.keys import models_prefix
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


def averaged(ctx: RankContext) -> Any:
    """Train a step further; return where it began, and the average that was restored there."""
    model = ctx.wrap(nn.Linear(1, 1))
    average = AveragedModel(model)
    ctx.track(model=model, average=average)
    begun = ctx.step, [value.tolist() for value in average.state_dict().values()]
    for (x,) in ctx.steps(
        ctx.loader(TensorDataset(torch.ones(4, 1)), global_batch_size=4), epochs=ctx.step + 1
    ):
        model(x).sum().backward()
        average.update_parameters(model)
    return begun, [value.tolist() for value in average.state_dict().values()]


def test_an_average_of_a_wrapped_model_fits_any_number_of_ranks(tmp_path: Path) -> None:
    """On two ranks it holds DDP, on one it doesn't; neither the checkpoint nor the exported
    model shows it."""
    config = config_for(tmp_path)
    (_, ended), _ = train_on(2, config, averaged)
    *_, last = list_manifests(config.storage, "run")
    export_models(config.storage, last, ["average"], 1, {})
    exported = load(config.storage.read(f"{models_prefix('run', 1)}average.safetensors"))
    assert set(exported) == {"n_averaged", "module.weight", "module.bias"}
    for world_size, step in ((1, 1), (2, 2)):
        (begun, later), *_ = train_on(world_size, config_for(tmp_path), averaged)
        assert begun == (step, ended)
        ended = later
