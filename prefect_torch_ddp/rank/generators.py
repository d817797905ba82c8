"""Owns how a rank's random generators are seeded.

Before the first step all ranks draw alike: models begin with equal weights. From the first step
on each rank has a stream of its own, or dropout would drop the same units on every rank.

Owns when a rank's random generators are seeded, and when they are put back to where a
checkpoint had them.
"""

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from prefect_torch_ddp.checkpoint.keys import rank_name
from prefect_torch_ddp.checkpoint.objects import read_state
from prefect_torch_ddp.data.sampler import mix_seed
from prefect_torch_ddp.rank.config import RankConfig, Stage
from prefect_torch_ddp.rank.loop.state import Place, TrainingState

if TYPE_CHECKING:
    from prefect_torch_ddp.checkpoint.restore import Restorer


_STAGES: dict[Stage, int] = {"prepare": 0, "train": 1, "evaluate": 2, "task": 3}


def seed_stage(seed: int, stage: Stage) -> None:
    """Seed python, numpy and torch, alike on all ranks."""
    _seed_all(mix_seed(seed, _STAGES[stage]))


def seed_rank(seed: int, step: int, rank: int) -> None:
    """Seed python, numpy and torch for the steps after `step`, differently on each rank."""
    _seed_all(mix_seed(seed, len(_STAGES), step, rank))


def seed_shared(seed: int, *of: int) -> None:
    """Seed python, numpy and torch for what numbers name, such as a step and a virtual rank,
    alike on whichever rank that is.
    """
    value = mix_seed(seed, len(_STAGES) + 1, *of)
    random.seed(value)
    np.random.seed(value % 2**32)
    # Not torch.manual_seed: until CUDA is up it notes the stack for a later call, a tenth of a
    # millisecond each time.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Generators:
    """The random generators of one rank's training."""

    def __init__(self, config: RankConfig, place: Place, state: TrainingState) -> None:
        """Leave them as they are."""
        self._config = config
        self._place = place
        self._state = state
        self._is_repeating = False
        self._num_saved_outside = 0
        self.have_begun = False
        """Whether `steps` has."""
        self.restorer: Restorer | None = None
        """Set where a training tracks something."""

    @property
    def are_the_users(self) -> bool:
        """Whether a loop of the user's own draws from them, since this training never came to
        `steps`.
        """
        return not self.have_begun and (
            self.restorer is None
            or self.restorer.manifest is None
            or self._state.position.in_own_loop
        )

    def go_on(self) -> None:
        """Put them back where a loop of the user's own goes on: behind the newest `track`, as
        far as anybody can tell.
        """
        if self.restorer is not None and self._state.position.in_own_loop:
            self.restorer.restore_generators(self._place.rank)

    def begin(self) -> bool:
        """Set them for the next step, where that is the first one of this process; return
        whether it is.
        """
        if self.have_begun and not self._is_repeating:
            return False
        self.have_begun, self._is_repeating = True, False
        # What an own loop left is no matter of the steps': undisturbed, they would begin with
        # generators of their own too.
        restorer = None if self._state.position.in_own_loop else self.restorer
        if restorer is None or not restorer.restore_generators(self._place.rank):
            seed_rank(self._config.seed, self._state.step, self._place.rank)
        if self.restorer is not None:
            self.restorer.release()
        self._state.position = replace(self._state.position, in_own_loop=False)
        return True

    def repeat(self) -> None:
        """Set them for code that runs a second time, up to where the checkpoint was made; the
        next step sets them once more.
        """
        self.begin()
        self._is_repeating, self._num_saved_outside = True, 0

    def saved_outside(self) -> None:
        """Take note of a checkpoint outside of `steps`: the first one behind the place was made
        before, the second was not.
        """
        self._is_repeating &= self._num_saved_outside == 0
        self._num_saved_outside += 1

    def to_come(self) -> Any | None:
        """Return the state that the next step will begin with, where that is restored and not
        what they are in now.
        """
        restorer = self.restorer
        if (
            (self.have_begun and not self._is_repeating)
            or self.are_the_users
            or restorer is None
            or restorer.manifest is None
        ):
            return None
        found = restorer.manifest.find(rank_name(self._place.rank))
        source = self._config.resume_from
        storage = self._config.storage if restorer.is_ours or source is None else source.storage
        return None if found is None else read_state(storage, restorer.manifest, found).state
