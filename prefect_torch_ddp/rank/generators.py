"""Seeding of a rank's random generators: python's, NumPy's and torch's.

Before the first step all ranks draw the same numbers, so that models start with equal weights.
Then each rank has its own stream; otherwise dropout would drop the same units everywhere.
"""

import torch

from prefect_torch_ddp.data.fetching import seed_on_cpu
from prefect_torch_ddp.data.sampler import mix_seed
from prefect_torch_ddp.rank.config import Stage

_STAGES: dict[Stage, int] = {"prepare": 0, "train": 1, "evaluate": 2, "task": 3}


def seed_stage(seed: int, stage: Stage) -> None:
    """Seed all ranks equally."""
    _seed_all(mix_seed(seed, _STAGES[stage]))


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seed for the steps after `step`, differently on each rank."""
    _seed_all(mix_seed(seed, len(_STAGES), step, rank))


def seed_shared(seed: int, *of: int) -> None:
    """Seed from numbers, such as a step and a virtual rank, equally on any rank."""
    value = mix_seed(seed, len(_STAGES) + 1, *of)
    seed_on_cpu(value)
    # Not torch.manual_seed: until CUDA is up it notes the stack for a later call, a tenth of a
    # millisecond each time.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)


def _seed_all(seed: int) -> None:
    seed_on_cpu(seed)
    torch.manual_seed(seed)
