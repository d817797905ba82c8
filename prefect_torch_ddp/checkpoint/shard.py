"""Shards: what a tracked object consists of in a checkpoint, and whether all of it is there."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, Self

GENERATORS = "random-generators"
"""The object that the ranks' random generators are shards of; no name of the user's has a dash."""
_OF_RANK = re.compile(r"(?:(.+)\.)?rank-(\d{5,})")


class Layout(StrEnum):
    """How the shards of an object make it; stored, so a value keeps its meaning.

    Sharded models, whose tensors are cut, will have a third one.
    """

    WHOLE = "whole"
    """There is one, which every rank restores."""
    BY_RANK = "by_rank"
    """Each rank has its own, which only that rank restores."""


class Shard(NamedTuple):
    """Which shard of which object; a whole object is its only one."""

    object: str
    """The tracked object's name."""
    layout: Layout = Layout.WHOLE
    rank: int | None = None
    """Whose it is; None: it is the whole object."""

    @classmethod
    def of_rank(cls, name: str, rank: int) -> Self:
        """Return a rank's own shard of an object."""
        return cls(name, Layout.BY_RANK, rank)

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the shard of a stored name, of a manifest in which nothing else tells it."""
        found = _OF_RANK.fullmatch(name)
        return cls(name) if found is None else cls.of_rank(found[1] or GENERATORS, int(found[2]))

    @property
    def name(self) -> str:
        """Its stored name: no two of a checkpoint are the same, and its key ends with it."""
        if self.layout is Layout.WHOLE:
            return self.object
        suffix = f"rank-{self.rank:05d}"
        return suffix if self.object == GENERATORS else f"{self.object}.{suffix}"


def uncovered(
    names: Iterable[str], shards: Iterable[Shard], world_size: int
) -> tuple[str, str] | None:
    """Return the first object that isn't there exactly once, and what is wrong with it.

    Args:
        names: the objects that have to be there; others have to be complete if they are.
        shards: what was written.
        world_size: how many ranks there are.
    """
    of_objects: dict[str, list[Shard]] = {name: [] for name in names}
    for shard in shards:
        of_objects.setdefault(shard.object, []).append(shard)
    faults = ((name, _fault(found, world_size)) for name, found in of_objects.items())
    return next((each for each in faults if each[1]), None)


def _fault(shards: Sequence[Shard], world_size: int) -> str:
    """Say why these shards aren't one object; nothing if they are."""
    layouts = sorted({shard.layout for shard in shards})
    if not layouts:
        return "no rank wrote it"
    if len(layouts) > 1:
        return f"it was written as {' and as '.join(layouts)}"
    is_whole = layouts == [Layout.WHOLE]
    needed: set[int | None] = {None} if is_whole else set(range(world_size))
    nums = Counter(shard.rank for shard in shards)
    for rank in sorted(needed | nums.keys(), key=str):
        what = "it" if rank is None else f"the shard of rank {rank}"
        if rank not in needed:
            return f"{what} doesn't belong to it"
        if not nums[rank]:
            return f"{what} is missing"
        if nums[rank] > 1:
            return f"{what} was written {nums[rank]} times"
    return ""
