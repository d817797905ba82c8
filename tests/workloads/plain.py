"""Plain functions for ranks: what they are, what they were given, what they return."""

import collections
import dataclasses
import os
from typing import Any

CONTRACT = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
)


@dataclasses.dataclass
class Point:
    """A value of a user's own class."""

    x: int


def sum_of_ones() -> float:
    """All-reduce a one; every rank gets world_size."""
    import torch
    import torch.distributed as dist

    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def awkward_names(  # noqa: PLR0917 - names that launchers like to steal
    key: int,
    retries: int,
    rank: int,
    workers: int,
    backend: str = "mine",
    timeout: float = 1.5,
    world_size: int = 9,
) -> Any:
    """Take arguments whose names launchers like to steal."""
    return {
        "key": key,
        "retries": retries,
        "rank": rank,
        "workers": workers,
        "backend": backend,
        "timeout": timeout,
        "world_size": world_size,
    }


def value_of(kind: str) -> Any:
    """Return a value of the kind named, marked with the rank."""
    import numpy as np
    import torch

    rank = int(os.environ["RANK"])
    counts: dict[str, int] = collections.defaultdict(int)
    counts["a"] = rank
    return {
        "none": None,
        "defaultdict": counts,
        "dataclass": Point(rank),
        "numpy": np.full(3, rank),
        "tensor": torch.full((2,), float(rank)),
        "nested": {"loss": [rank, (rank, {"x": torch.tensor(rank)})]},
    }[kind]


def environment() -> dict[str, str]:
    """Return the rank's environment."""
    return dict(os.environ)


def process_id() -> int:
    """Return the rank's process id."""
    return os.getpid()


def torchrun_style() -> float:
    """Initialise the process group as everything written for torchrun does."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return float(ones)


def speak(text: str) -> None:
    """Print, write to stderr and log."""
    import logging
    import sys

    print(f"printed {text}")
    print(f"complained {text}", file=sys.stderr)
    logging.getLogger("user.code").warning("logged %s", text)


def load_with_workers(context: str | None) -> int:
    """Read a dataset through two DataLoader workers."""
    from torch.utils.data import DataLoader

    from tests.workloads.squares import Squares

    transform = (lambda x: x + 1) if context == "fork" else None
    loader = DataLoader(
        Squares(10, transform), batch_size=2, num_workers=2, multiprocessing_context=context
    )
    return int(sum(batch.sum() for batch in loader))


def time_of_first_all_reduce() -> float:
    """Return when this rank's first all-reduce was done, in seconds since the epoch."""
    import time

    sum_of_ones()
    return time.time()
