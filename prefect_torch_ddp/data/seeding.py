"""Owns the generators that datasets draw from, python's, NumPy's and torch's: seeded for each sample, and put back."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

import numpy as np
import torch

from prefect_torch_ddp.errors import InvalidParamsError

SeedSamples: TypeAlias = bool | Literal["torch"]
"""Which generators are seeded for each sample in worker processes: python's, NumPy's and torch's; torch's alone; none."""


def check_seed_samples(seed_samples: object) -> None:
    """Refuse what is no choice.

    Raises:
        InvalidParamsError: names the choices.
    """
    if not isinstance(seed_samples, bool) and seed_samples != "torch":
        msg = f"seed_samples is {seed_samples!r}; choose True, 'torch' or False"
        raise InvalidParamsError(msg)


def seed_on_cpu(seed: int, seed_samples: SeedSamples = True) -> None:  # noqa: FBT002 - a choice of three
    """Seed what datasets draw from: the global generators of python, numpy and torch, or of torch alone."""
    if seed_samples is True:
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 - augmentations draw from the global generator
    # Not torch.manual_seed: before CUDA is up it queues one call per sample, for ever.
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Put python's, numpy's and torch's random generators back at the end."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.default_generator.set_state(states[2])
