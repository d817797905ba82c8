"""A loss that is NaN, as docs/failures.md says: training continues, the best checkpoint stays."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import CheckpointParams, RankContext, storage_from_uri
from prefect_torch_ddp.checkpoint.manifest import list_manifests

NAN_FROM = 4


def test_the_best_checkpoint_outlives_a_loss_that_is_nan(tmp_path: Path) -> None:
    """All steps are made, and of the checkpoints before the NaN the best one is kept."""
    often = CheckpointParams(every_s=None, every_steps=1, best_metric="loss", best_mode="min")
    with RankContext.local(storage=tmp_path, checkpoint=often) as ctx:
        ctx.track(model=nn.Linear(1, 1))
        loader = ctx.loader(TensorDataset(torch.ones(40, 1)), global_batch_size=4)
        for _ in ctx.steps(loader, epochs=1):
            ctx.report(loss=math.nan if ctx.step >= NAN_FROM else 1 / ctx.step)
        assert ctx.step == 10
    kept = {manifest.step for manifest in list_manifests(storage_from_uri(str(tmp_path)), "local")}
    assert kept == {NAN_FROM - 1, 9, 10}
