"""A training that fails on rank 1 once its storage has fallen silent.

Torch is imported inside.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect_torch_ddp import RankContext


def train(ctx: "RankContext", folder: str, how: str) -> int:
    """Have the storage fall silent in step 3, and while something waits for it fail in step 6;
    or train to the end.

    Args:
        ctx: this rank.
        folder: a file "silent" in it silences the storage, for as long as it is there; "asked"
            says that something waits.
        how: "fails" or "goes on".
    """
    import torch
    from torch.utils.data import TensorDataset

    model = ctx.wrap(torch.nn.Linear(1, 1))
    ctx.track(model=model)
    for (x,) in ctx.steps(
        ctx.loader(TensorDataset(torch.ones(24, 1)), global_batch_size=2), epochs=1
    ):
        model(x).sum().backward()
        ctx.report(loss=1.0)
        ctx.checkpoint(force=ctx.step in (4, 10))
        _pass_by(ctx, Path(folder), how)
    return ctx.step


def _pass_by(ctx: "RankContext", folder: Path, how: str) -> None:
    match ctx.step, ctx.rank, how:
        case (3, 0, _):
            (folder / "silent").touch()
        case (6, 1, "fails"):
            _wait_until((folder / "asked").exists)
            msg = "a bug of the user's"
            raise ValueError(msg)
        case (6, 0, "goes on"):
            _wait_until((folder / "asked").exists)
            (folder / "on").touch()
        case (8, _, "goes on"):
            _wait_until(lambda: not (folder / "silent").exists())


def _wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)
