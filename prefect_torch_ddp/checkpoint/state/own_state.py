"""What a tracked object consists of in a checkpoint: one whole, or a shard from each rank.

Sharded models, whose parts have a layout, will be a third way.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prefect_torch_ddp.checkpoint.keys import shard_name
from prefect_torch_ddp.checkpoint.manifest import Manifest, ManifestObject
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
    return 0 if manifest.find(shard_name(name, 0)) is None else manifest.world_size


def find_own(manifest: Manifest, name: str, item: OwnState) -> ManifestObject | None:
    """Return a rank's shard of an object; None: the checkpoint has none, or it starts over.

    Raises:
        CheckpointError: the states are those of another number of ranks.
    """
    if manifest.find(shard_name(name, 0)) is None:
        return None
    if manifest.world_size == item.world_size:
        return manifest.find(shard_name(name, item.rank))
    if item.begins_anew:
        return None
    msg = (
        f"{name!r} was tracked by ctx.track_each on {manifest.world_size} ranks, and here are "
        f"{item.world_size}: the states fit no rank. Resume on {manifest.world_size} ranks, or "
        "start the states over with ctx.track_each(on_other_world_size='begin', ...)"
    )
    raise CheckpointError(msg)


def uncovered(
    names: Iterable[str], written: Iterable[tuple[str, int | None]], world_size: int
) -> str | None:
    """Return the first object that isn't there exactly once: as a whole, or from each rank.

    Args:
        names: the objects'.
        written: name and rank of what was written, as in a `ManifestObject`.
        world_size: how many ranks there are.
    """
    there = sorted(written, key=str)
    for name in names:
        found = [pair for pair in there if pair[0].partition(".")[0] == name]
        shards: list[tuple[str, int | None]] = [
            (shard_name(name, rank), rank) for rank in range(world_size)
        ]
        if found not in ([(name, None)], sorted(shards, key=str)):
            return name
    return None
