"""Reading records back: the lines of all ranks' parts, and which attempts' lines count."""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeVar

import orjson

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.records.log import SUFFIX, records_folder
from prefect_torch_ddp.storage.formats import DAMAGE, Format, location
from prefect_torch_ddp.storage.protocol import ObjectPart, Storage, StoredObject

BYTES_AHEAD = 2**25
"""What is in memory at a time, at least a part."""

R = TypeVar("R")

logger = logging.getLogger(__name__)


def list_parts(storage: Storage, run_id: str, kind: str) -> list[StoredObject]:
    """Return all parts that ranks wrote of a kind, in order of rank, attempt and part."""
    prefix = f"{records_folder(run_id, kind)}/"
    return [found for found in storage.list(prefix) if found.key.endswith(SUFFIX)]


def read_parts(
    storage: Storage,
    parts: Sequence[StoredObject],
    kind: Format,
    parse: Callable[[dict[str, Any]], R],
) -> Iterator[R]:
    """Yield what `parse` makes of each record; damaged lines are left out, with a warning.

    A part that doesn't begin with its format is left out as well: who wrote it isn't known.

    Raises:
        NewerFormatError: a part is of a newer format.
        StorageError: a part can't be read.
    """
    ends = accumulate(part.num_bytes for part in parts)
    for _, batch in groupby(zip(ends, parts, strict=True), lambda each: each[0] // BYTES_AHEAD):
        some = [part for _, part in batch]
        for part, data in zip(some, contents(storage, some), strict=True):
            if isinstance(data, StorageError):
                raise data
            head, *lines = data.split(b"\n")
            try:
                kind.check(orjson.loads(head), location(storage, part.key))
            except DAMAGE as error:
                text = "%s doesn't begin with its format and is left out: %r"
                logger.warning(text, part.key, error)
                continue
            for number, line in enumerate(lines, start=2):
                try:
                    if line:
                        yield parse(orjson.loads(line))
                except DAMAGE as error:
                    text = "line %d of %s is damaged and left out: %r"
                    logger.warning(text, number, part.key, error)


def contents(storage: Storage, parts: Sequence[StoredObject]) -> Sequence[bytes | StorageError]:
    """Read objects, in their order; the failure of one is its value."""
    # Concurrently if that pays: a day's training leaves thousands of small objects, and S3
    # takes some 30 ms for each.
    return storage.read_many([ObjectPart(part.key, part.num_bytes) for part in parts])


class Stretch(NamedTuple):
    """What an attempt recorded before it was known where it begins, or since then."""

    attempt: int
    is_start_known: bool
    """Whether that was known: its checkpoint had been looked for, or it was clear without one."""


def resumed_at(firsts: Mapping[Stretch, tuple[bool, float]]) -> dict[int, int]:
    """Return the first step that each attempt makes, also if it was killed before it made one.

    One that doesn't know it yet is left out. A training may never look for a checkpoint: then all
    attempts begin with their first records.

    Args:
        firsts: as `first_steps` of `records/metrics.py` gives it. If no attempt has records of a
            step, the loop is the user's own, and the steps of its records are the numbers of its
            checkpoints.
    """
    known = {
        stretch: first for stretch, first in firsts.items() if stretch.is_start_known
    } or firsts
    has_steps = not all(is_untrained for is_untrained, _ in known.values())
    return {
        stretch.attempt: int(step) + (is_untrained and has_steps)
        for stretch, (is_untrained, step) in known.items()
    }


def superseded(firsts: Mapping[Stretch, tuple[bool, float]]) -> dict[Stretch, float]:
    """Return the step from which on each stretch's records are superseded; infinity for none.

    What an attempt recorded before its start was known supersedes nothing. Attempts repeat it, so
    only one attempt's counts.

    Args:
        firsts: as for `resumed_at`.
    """
    ends = superseded_from(resumed_at(firsts))
    found = {
        stretch: ends[stretch.attempt] if stretch.is_start_known else 0.0 for stretch in firsts
    }
    if (counting := _counting_early(firsts)) is not None:
        found[counting] = math.inf
    return found


def _counting_early(stretches: Collection[Stretch]) -> Stretch | None:
    """Return which of the stretches before a start was known counts.

    An attempt without later records may have been killed before it had made all such reports. So
    that of the first attempt with later records counts; until there is one, the newest. This is
    final once `steps` has made a checkpoint, before which trackers are told nothing: rank 0 has
    recorded a step by then.
    """
    early = sorted(stretch for stretch in stretches if not stretch.is_start_known)
    whole = [stretch for stretch in early if stretch._replace(is_start_known=True) in stretches]
    return next(iter(whole + early[-1:]), None)


def superseded_from(firsts: Mapping[int, int]) -> dict[int, float]:
    """Return the step from which on each attempt's records are superseded; infinity for none.

    A resumed attempt begins after the checkpoint it restored, on all ranks at once. Its first
    step supersedes everything that older attempts recorded from there on, on every rank, also
    of steps that it hasn't reached and of ranks that it no longer has.

    Args:
        firsts: the first step of each attempt.
    """
    superseded: dict[int, float] = {}
    first_of_newer = math.inf
    for attempt in sorted(firsts, reverse=True):
        superseded[attempt] = first_of_newer
        first_of_newer = min(first_of_newer, firsts[attempt])
    return superseded
