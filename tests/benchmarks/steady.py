"""A steady DDP training that is the same under torchrun, under run_gang and with a
RankContext, and trains on command.

Two trainings are compared block by block, each waiting while the other has its turn: the pace
of a machine drifts by more in some seconds than they differ by.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

if TYPE_CHECKING:
    from prefect_torch_ddp import RankContext

NUM_ROWS_KEPT = 8192
WARM_UP = 10
"""Steps at the beginning of a block that don't count: caches are somebody else's until then."""


@dataclass(frozen=True)
class Turns:
    """Blocks of steps, each at a word from outside."""

    folder: str
    """Holds the two named pipes `go` and `done`, both for rank 0."""
    num_turns: int
    works: Sequence[tuple[int, int]]
    """Rows per rank and step, and the steps of a block that count."""
    width: int = 256
    """Features of a row."""
    device: str = "cpu"


class Rows(Dataset[Any]):
    """Features that cost next to nothing to read: a batch at a time, as DataLoader asks for it;
    the same ones come again."""

    def __init__(self, num_rows: int, width: int) -> None:
        self._num_rows = num_rows
        self._rows = torch.randn(NUM_ROWS_KEPT, width, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index % NUM_ROWS_KEPT]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        """Return a batch of rows, already one tensor."""
        return self._rows[torch.tensor(indices) % NUM_ROWS_KEPT]


def same(batch: Any) -> Any:
    """Collate what is a batch already."""
    return batch


def make_model(width: int) -> torch.nn.Module:
    """Return an MLP of three square layers."""
    torch.manual_seed(0)
    layers = [
        module for _ in range(3) for module in (torch.nn.Linear(width, width), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*layers)


def in_blocks(batches: Iterable[Any], turns: Turns, num_steps: int) -> Iterator[Any]:
    """Yield the batches; before each block wait for one's turn, and after it tell the seconds
    per step."""
    began, block = 0.0, WARM_UP + num_steps
    tell(turns, "ready")
    for number, batch in enumerate(batches):
        if number % block == 0:
            if number:
                tell(turns, repr((now(turns) - began) / num_steps))
            wait_for_turn(turns)
        if number % block == WARM_UP:
            began = now(turns)
        yield batch
    tell(turns, repr((now(turns) - began) / num_steps))


def now(turns: Turns) -> float:
    """Return the time once the device has done all that it was given."""
    if turns.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def wait_for_turn(turns: Turns) -> None:
    """Have rank 0 wait for the word, and the others for rank 0."""
    if dist.get_rank() == 0:
        with Path(turns.folder, "go").open() as pipe:
            pipe.readline()
    dist.barrier()


def tell(turns: Turns, word: str) -> None:
    """Say that a work can begin, or how fast a block was."""
    if dist.get_rank() == 0:
        with Path(turns.folder, "done").open("w") as pipe:
            pipe.write(f"{word}\n")


def train(
    batches: Iterable[torch.Tensor],
    model: torch.nn.Module,
    device: str,
    ctx: "RankContext | None" = None,
) -> None:
    """Train, as any PyTorch code does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in batches:
        loss = model(batch.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if ctx is not None:
            ctx.report(loss=loss)


def plain(turns: Turns) -> None:
    """Train each of the works with plain torch.distributed."""
    for local_batch, num_steps in turns.works:
        num_rows = local_batch * dist.get_world_size() * (num_steps + WARM_UP) * turns.num_turns
        rows = Rows(num_rows, turns.width)
        sampler: DistributedSampler[Any] = DistributedSampler(rows)
        loader = DataLoader(rows, batch_size=local_batch, sampler=sampler, collate_fn=same)
        model = DistributedDataParallel(make_model(turns.width).to(turns.device))
        train(in_blocks(loader, turns, num_steps), model, turns.device)


def with_context(ctx: "RankContext", turns: Turns) -> None:
    """Train the same by ctx.wrap, ctx.loader, ctx.steps and ctx.report."""
    for local_batch, num_steps in turns.works:
        global_batch = local_batch * ctx.world_size
        rows = Rows(global_batch * (num_steps + WARM_UP) * turns.num_turns, turns.width)
        loader = ctx.loader(rows, global_batch_size=global_batch, collate_fn=same)
        batches = in_blocks(ctx.steps(loader, epochs=1), turns, num_steps)
        train(batches, ctx.wrap(make_model(turns.width)), turns.device, ctx)


if __name__ == "__main__":
    its_turns = Turns(**json.loads(sys.argv[1]))
    if its_turns.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if its_turns.device == "cuda" else "gloo")
    plain(its_turns)
    dist.destroy_process_group()
