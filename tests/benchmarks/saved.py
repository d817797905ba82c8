"""A DDP training of 300 MB that is saved in several ways, turn by turn, and tells what
each save costs it."""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import TensorDataset

from prefect_torch_ddp import RankContext

WIDTH = 1024
NUM_LAYERS = 24
ROWS = 16
STEPS_OF_A_TURN = 8
"""The first one is saved, the others go on beside what is still being written."""
NOTHING, OURS, TORCH, DCP, DCP_KEPT = (
    "nothing",
    "prefect_torch_ddp",
    "torch.save on rank 0",
    "dcp.async_save",
    "dcp.async_save, buffers kept",
)
WAYS = (NOTHING, OURS, TORCH, DCP, DCP_KEPT)


class Others:
    """The ways to save that this package is compared with; each replaces its last
    checkpoint."""

    def __init__(self, rank: int, state: Callable[[], dict[str, Any]], folder: Path) -> None:
        self._rank = rank
        self._state = state
        self._folder = folder
        # Of its own: its thread's collectives would meet the training's.
        self._group = dist.new_group()
        # As async_save makes one by itself, yet kept, which lets it use its buffers again.
        options = {
            f"use_{what}": False
            for what in ("pinned_memory", "shared_memory", "async_staging", "non_blocking_copy")
        }
        self._stager = DefaultStager(StagingOptions(**options))
        self._writing: Future[Any] | None = None

    def save(self, way: str) -> None:
        """Save, or begin to."""
        place = self._folder / way
        if way == TORCH and self._rank == 0:
            torch.save(self._state(), place)
        elif way in (DCP, DCP_KEPT):
            stager = self._stager if way == DCP_KEPT else None
            group: Any = self._group
            writing = dcp.async_save(
                self._state(), checkpoint_id=place, process_group=group, async_stager=stager
            )
            assert isinstance(writing, Future)
            self._writing = writing

    def wait(self) -> None:
        """Wait until all is written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        dist.barrier()
        if self._rank == 0:
            for place in self._folder.iterdir():
                shutil.rmtree(place) if place.is_dir() else place.unlink()
        dist.barrier()


def make_model() -> nn.Module:
    """Return a model of 100 MB; with AdamW's two moments the state has 300 MB."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))


def in_turns(
    ctx: RankContext, num_rounds: int, folder: str
) -> list[tuple[str, float, float, float]]:
    """Train; return for each turn the way, and in seconds: the gang's stall, the steps after
    it, what was still to be written.

    On a GPU, each time is taken once the device has done all that it was given.
    The stall is from the end of a step on all ranks to the beginning of the next on all ranks.
    """
    model = ctx.wrap(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ctx.track(model=model, optimizer=optimizer)
    bare: Any = model.module if ctx.world_size > 1 else model
    others = Others(
        ctx.rank,
        lambda: {"model": bare.state_dict(), "optimizer": optimizer.state_dict()},
        Path(folder),
    )
    rows = TensorDataset(
        torch.randn(ctx.world_size * len(WAYS) * num_rounds * STEPS_OF_A_TURN, WIDTH)
    )
    turns, ended, resumed = [], 0.0, 0.0
    for number, (_row,) in enumerate(
        ctx.steps(ctx.loader(rows, global_batch_size=ctx.world_size), epochs=1)
    ):
        turn, place = divmod(number, STEPS_OF_A_TURN)
        way = WAYS[(turn + turn // len(WAYS)) % len(WAYS)]
        if place == 1:
            resumed = now(ctx)
        loss = model(torch.randn(ROWS, WIDTH, device=ctx.device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if place == 0:
            ended = now(ctx)
            others.save(way)
            ctx.checkpoint(force=way == OURS)
        elif place == STEPS_OF_A_TURN - 1:
            over = now(ctx)
            finish(ctx)
            others.wait()
            turns.append((way, resumed - ended, over - resumed, time.perf_counter() - over))
    return turns


def now(ctx: RankContext) -> float:
    """Return the time once all ranks and their devices have come here."""
    if ctx.device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def finish(ctx: RankContext) -> None:
    """Wait until this rank's checkpoint is written."""
    assert ctx._assembly.saver._checkpointer is not None
    ctx._assembly.saver._checkpointer.wait()
