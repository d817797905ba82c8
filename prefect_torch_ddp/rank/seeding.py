"""Owns how a rank's random generators are seeded.

Before the first step all ranks draw alike: models begin with equal weights. From the first step on each rank has a stream of its
own, or dropout would drop the same units on every rank.
"""

import random

import numpy as np
import torch

from prefect_torch_ddp.data.sampler import mix_seed
from prefect_torch_ddp.rank.config import Stage

_STAGES: dict[Stage, int] = {"prepare": 0, "train": 1, "evaluate": 2, "task": 3}


def seed_stage(seed: int, stage: Stage) -> None:
    """Seed python, numpy and torch, alike on all ranks."""
    _seed_all(mix_seed(seed, _STAGES[stage]))


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seed python, numpy and torch for the steps after `step`, differently on each rank."""
    _seed_all(mix_seed(seed, len(_STAGES), step, rank))


def seed_shared(seed: int, *of: int) -> None:
    """Seed python, numpy and torch for what numbers name, such as a step and a virtual rank, alike on whichever rank that is."""
    value = mix_seed(seed, len(_STAGES) + 1, *of)
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 - user code draws from the global generator
    # Not torch.manual_seed: until CUDA is up it notes the stack for a later call, a tenth of a millisecond each time.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - user code draws from the global generator
    torch.manual_seed(seed)
