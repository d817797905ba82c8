"""Owns a steady DDP training that is the same under torchrun, under run_gang and with a RankContext, and measures its pace."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

if TYPE_CHECKING:
    from prefect_torch_ddp import RankContext

WIDTH = 256
WARM_UP = 20


class Rows(Dataset[Any]):
    """Features and targets that cost next to nothing to read: a batch at a time, as DataLoader asks for it."""

    def __init__(self, num_rows: int) -> None:
        """Draw them."""
        self._rows = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one row."""
        return self._rows[index]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        """Return a batch of rows, already one tensor."""
        return self._rows[indices]


def same(batch: torch.Tensor) -> torch.Tensor:
    """Collate what is a batch already."""
    return batch


def make_model() -> torch.nn.Module:
    """Return an MLP of three square layers."""
    torch.manual_seed(0)
    layers = [module for _ in range(3) for module in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers)


def pace(batches: Iterable[torch.Tensor], model: torch.nn.Module, num_steps: int, rank: "RankContext | None" = None) -> float:
    """Train; return the seconds for each step after the first ones."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    began = 0.0
    for number, batch in enumerate(batches):
        if number == WARM_UP:
            began = time.perf_counter()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank is not None:
            rank.report(loss=loss)
    return (time.perf_counter() - began) / num_steps


def plain(works: Sequence[tuple[int, int]]) -> list[float]:
    """Train each of (rows per rank and step, steps) with plain torch.distributed; return the seconds per step of each."""
    paces = []
    for local_batch, num_steps in works:
        rows = Rows(local_batch * dist.get_world_size() * (num_steps + WARM_UP))
        sampler: DistributedSampler[Any] = DistributedSampler(rows)
        loader = DataLoader(rows, batch_size=local_batch, sampler=sampler, collate_fn=same)
        paces.append(pace(loader, DistributedDataParallel(make_model()), num_steps))
        dist.barrier()
    return paces


def with_context(rank: "RankContext", works: Sequence[tuple[int, int]]) -> list[float]:
    """Train the same by rank.wrap, rank.loader, rank.steps and rank.report."""
    paces = []
    for local_batch, num_steps in works:
        global_batch = local_batch * rank.world_size
        loader = rank.loader(Rows(global_batch * (num_steps + WARM_UP)), global_batch_size=global_batch, collate_fn=same)
        paces.append(pace(rank.steps(loader, epochs=1), rank.wrap(make_model()), num_steps, rank))
    return paces


if __name__ == "__main__":
    dist.init_process_group("gloo")
    result = plain(json.loads(sys.argv[1]))
    if dist.get_rank() == 0:
        print(f"paces {json.dumps(result)}", flush=True)
    dist.destroy_process_group()
