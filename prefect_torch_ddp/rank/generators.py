"""Owns when a rank's random generators are seeded, and when they are put back to where a checkpoint had them."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefect_torch_ddp.checkpoint.keys import rank_name
from prefect_torch_ddp.checkpoint.reading import read_state
from prefect_torch_ddp.rank.config import RankConfig
from prefect_torch_ddp.rank.seeding import seed_rank
from prefect_torch_ddp.rank.state import Place, TrainingState

if TYPE_CHECKING:
    from prefect_torch_ddp.checkpoint.restore import Restorer


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
        """Whether a loop of the user's own draws from them, since this training never came to `steps`."""
        return not self.have_begun and (
            self.restorer is None or self.restorer.manifest is None or self._state.position.in_own_loop
        )

    def go_on(self) -> None:
        """Put them back where a loop of the user's own goes on: behind the newest `track`, as far as anybody can tell."""
        if self.restorer is not None and self._state.position.in_own_loop:
            self.restorer.restore_generators(self._place.rank)

    def begin(self) -> bool:
        """Set them for the next step, where that is the first one of this process; return whether it is."""
        if self.have_begun and not self._is_repeating:
            return False
        self.have_begun, self._is_repeating = True, False
        # What an own loop left is no matter of the steps': undisturbed, they would begin with generators of their own too.
        restorer = None if self._state.position.in_own_loop else self.restorer
        if restorer is None or not restorer.restore_generators(self._place.rank):
            seed_rank(self._config.seed, self._state.step, self._place.rank)
        if self.restorer is not None:
            self.restorer.release()
        self._state.position = replace(self._state.position, in_own_loop=False)
        return True

    def repeat(self) -> None:
        """Set them for code that runs a second time, up to where the checkpoint was made; the next step sets them once more."""
        self.begin()
        self._is_repeating, self._num_saved_outside = True, 0

    def saved_outside(self) -> None:
        """Take note of a checkpoint outside of `steps`: the first one behind the place was made before, the second was not."""
        self._is_repeating &= self._num_saved_outside == 0
        self._num_saved_outside += 1

    def to_come(self) -> Any | None:
        """Return the state that the next step will begin with, where that is restored and not what they are in now."""
        restorer = self.restorer
        if (self.have_begun and not self._is_repeating) or self.are_the_users or restorer is None or restorer.manifest is None:
            return None
        found = restorer.manifest.find(rank_name(self._place.rank))
        source = self._config.resume_from
        storage = self._config.storage if restorer.is_ours or source is None else source.storage
        return None if found is None else read_state(storage, restorer.manifest, found).state
