"""What `ctx.track` refuses, and what is left of it."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from prefect_torch_ddp import RankContext
from prefect_torch_ddp.checkpoint.manifest import list_manifests
from prefect_torch_ddp.errors import InvalidParamsError
from prefect_torch_ddp.storage.directory import DirectoryStorage


class Unloadable:
    """What can be tracked by its methods, and not read back."""

    def state_dict(self) -> dict[str, Any]:
        """Return what no checkpoint can hold."""
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
