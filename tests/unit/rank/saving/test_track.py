"""What `ctx.track` refuses, and what is left of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from prefect_torch_ddp import CheckpointParams, RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.support.tracked import Tracked


class Unloadable:
    """What can be tracked by its methods, and not read back."""

    def state_dict(self) -> dict[str, Any]:
        return {"folder": Path()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


def test_an_object_that_was_refused_is_not_tracked(tmp_path: Path) -> None:
    """Nor are those of the same call: who catches the error may track them, and the training
    ends well."""
    with RankContext.local(storage=tmp_path) as ctx:
        model = nn.Linear(1, 1)
        with pytest.raises(InvalidParamsError, match="'other'"):
            ctx.track(model=model, other=Unloadable())
        ctx.track(model=model)
    (manifest,) = list_manifests(DirectoryStorage(tmp_path), "local")
    assert {item.name for item in manifest.objects} == {"model", "rank-00000"}


def test_a_state_that_turns_unreadable_ends_the_training(tmp_path: Path) -> None:
    """Before it is saved, so that the checkpoints before it stay the newest and are restored."""
    policy = CheckpointParams(every_steps=1, every_s=None)
    settings: dict[str, Any] = {"storage": tmp_path, "run_id": "run", "checkpoint": policy}
    best = Tracked()
    refused = r"'best' can't be read back .* state_dict\(\)\['value'\] is a numpy.ndarray"
    with pytest.raises(InvalidParamsError, match=refused), RankContext.local(**settings) as ctx:
        ctx.track(best=best)
        loader = ctx.loader(TensorDataset(torch.ones(6)), global_batch_size=1)
        for _ in ctx.steps(loader, epochs=1):
            best.value = ctx.step if ctx.step < 3 else np.ones(3)
    steps = [manifest.step for manifest in list_manifests(DirectoryStorage(tmp_path), "run")]
    assert steps[-1] == 2
    resumed = Tracked()
    with RankContext.local(**settings) as ctx:
        ctx.track(best=resumed)
        assert (ctx.step, resumed.value) == (2, 2)
