"""Reading records back: the lines of all ranks' parts, and which attempts' lines count."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, TypeVar

import orjson

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.records.log import SUFFIX, records_folder
from prefect_torch_ddp.storage.formats import DAMAGE, Format, location
from prefect_torch_ddp.storage.protocol import ObjectPart, Storage, StoredObject

BYTES_AHEAD = 2**25
"""What is in memory at a time, at least a part."""

R = TypeVar("R")

logger = logging.getLogger(__name__)


def record_parts(storage: Storage, run_id: str, kind: str) -> list[StoredObject]:
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
