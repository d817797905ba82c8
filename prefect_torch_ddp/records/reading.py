"""Reading records back: the lines of all ranks' parts, and which attempts' lines count."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, TypeVar

import orjson

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.records.log import SUFFIX, records_folder
from prefect_torch_ddp.storage.protocol import ObjectPart, Readable, Storage, StoredObject

BYTES_AHEAD = 2**25
"""What is in memory at a time, at least a part."""

R = TypeVar("R")

logger = logging.getLogger(__name__)


def record_parts(storage: Storage, run_id: str, kind: str) -> list[StoredObject]:
    """Return all parts that ranks wrote of a kind, in order of rank, attempt and part."""
    prefix = f"{records_folder(run_id, kind)}/"
    return [found for found in storage.list(prefix) if found.key.endswith(SUFFIX)]


def read_parts(
    storage: Storage, parts: Sequence[StoredObject], parse: Callable[[dict[str, Any]], R]
) -> Iterator[R]:
    """Yield what `parse` makes of each record; damaged lines are left out, with a warning.

    Raises:
        StorageError: a part can't be read.
    """
    ends = accumulate(part.num_bytes for part in parts)
    for _, batch in groupby(zip(ends, parts, strict=True), lambda each: each[0] // BYTES_AHEAD):
        some = [part for _, part in batch]
        for part, data in zip(some, contents(storage, some), strict=True):
            if isinstance(data, StorageError):
                raise data
            for number, line in enumerate(data.split(b"\n"), start=1):
                try:
                    if line:
                        yield parse(orjson.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    text = "line %d of %s is damaged and left out: %r"
                    logger.warning(text, number, part.key, error)


def contents(storage: Storage, parts: Sequence[StoredObject]) -> Sequence[bytes | StorageError]:
    """Read objects, in their order; the failure of one is its value."""

    def read(part: StoredObject) -> bytes | StorageError:
        try:
            return storage.read(part.key)
        except StorageError as error:
            return error

    # Concurrently where that pays: a day's training leaves thousands of small objects, and S3
    # takes some 30 ms for each.
    if isinstance(storage, Readable):
        return storage.read_many([ObjectPart(part.key, part.num_bytes) for part in parts])
    return [read(part) for part in parts]


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
