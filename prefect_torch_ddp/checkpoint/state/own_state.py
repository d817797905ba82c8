"""Tracked objects whose state is each rank's own: `ctx.track_each`'s, and loaders of others."""

from dataclasses import dataclass
from typing import Any

from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
from prefect_torch_ddp.checkpoint.shard import Layout
from prefect_torch_ddp.checkpoint.state.serial import load_state, state_of
from prefect_torch_ddp.errors import CheckpointError


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


def num_owners(manifest: Manifest, name: str) -> int:
    """Return how many ranks have their own state of an object there; 0: there is none."""
    here = (item for item in manifest.objects if item.object == name)
    return sum(item.layout is Layout.BY_RANK for item in here)


def find_own(manifest: Manifest, name: str, item: OwnState) -> ManifestObject | None:
    """Return a rank's shard of an object; None: the checkpoint has none, or it starts over.

    Raises:
        CheckpointError: the states are those of another number of ranks.
    """
    num = num_owners(manifest, name)
    if num in (0, item.world_size):
        return manifest.find(name, item.rank)
    if item.begins_anew:
        return None
    msg = (
        f"{name!r} was tracked by ctx.track_each on {num} ranks, and here are "
        f"{item.world_size}: the states fit no rank. Resume on {num} ranks, or "
        "start the states over with ctx.track_each(on_other_world_size='begin', ...)"
    )
    raise CheckpointError(msg)
