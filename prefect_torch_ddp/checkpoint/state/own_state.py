"""Tracked objects whose state is each rank's own: `ctx.track_each`'s, and loaders of others."""

from dataclasses import dataclass
from typing import Any

from prefect_torch_ddp.checkpoint.state.serial import load_state, state_of


@dataclass(frozen=True)
class OwnState:
    """A tracked object whose state is each rank's own; see `RankContext.track_each`."""

    item: Any
    rank: int
    world_size: int
    begins_anew: bool = False
    """Whether it keeps its initial state if another number of ranks saved it."""

    def state_dict(self) -> Any:
        """Return this rank's state."""
        return state_of(self.item)

    def load_state_dict(self, state: Any) -> None:
        """Load it."""
        load_state(self.item, state)
