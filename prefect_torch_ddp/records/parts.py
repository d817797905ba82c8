"""Reading records back: the lines of all ranks' parts, and which attempts' lines count."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.protocol import ObjectPart, ReadsMany, Storage, StoredObject

NUM_PARALLEL_READS = 8
NUM_AHEAD = 256
"""Objects that are in memory at a time."""

R = TypeVar("R")

logger = logging.getLogger(__name__)


class Numbered(Protocol):
    """A record: it has a step, from 1, and the attempt that did it."""

    @property
    def step(self) -> int: ...  # noqa: D102

    @property
    def attempt(self) -> int: ...  # noqa: D102


N = TypeVar("N", bound=Numbered)


def record_parts(storage: Storage, folder: str) -> list[StoredObject]:
    """Return all parts that ranks wrote below a folder, in order of rank, attempt and part."""
    return [found for found in storage.list(f"{folder}/") if found.key.endswith(".jsonl")]


def read_parts(
    storage: Storage, parts: Sequence[StoredObject], parse: Callable[[dict[str, Any]], R]
) -> Iterator[R]:
    """Yield every record of the parts; damaged lines are left out, with a warning.

    Raises:
        StorageError: a part can't be read.
    """
    for start in range(0, len(parts), NUM_AHEAD):
        some = parts[start : start + NUM_AHEAD]
        for part, data in zip(some, _contents(storage, some), strict=True):
            if isinstance(data, StorageError):
                raise data
            yield from _parse(part.key, data, parse)


def _contents(storage: Storage, parts: Sequence[StoredObject]) -> Sequence[bytes | StorageError]:
    # Concurrently: a day's training leaves thousands of small objects, and S3 takes some 30 ms
    # for each.
    if isinstance(storage, ReadsMany):
        return storage.read_many([ObjectPart(part.key, part.num_bytes) for part in parts])
    with ThreadPoolExecutor(NUM_PARALLEL_READS, thread_name_prefix="read-records") as pool:
        return list(pool.map(storage.read, [part.key for part in parts]))


def _parse(key: str, data: bytes, parse: Callable[[dict[str, Any]], R]) -> Iterator[R]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                yield parse(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("line %d of %s is damaged and left out: %r", number, key, error)


def first_steps(records: Iterable[Numbered]) -> dict[int, int]:
    """Return the first step of every attempt."""
    first: dict[int, int] = {}
    for record in records:
        first[record.attempt] = min(record.step, first.get(record.attempt, record.step))
    return first


def superseded_from(firsts: Mapping[int, int]) -> dict[int, float]:
    """Return the step from which on each attempt's records are superseded; infinity for none.

    A resumed attempt begins after the checkpoint it restored, on all ranks at once. Its first
    step supersedes everything that older attempts recorded from there on, on every rank, also
    of steps that it hasn't reached and of ranks that it no longer has.
    """
    superseded: dict[int, float] = {}
    first_of_newer = math.inf
    for attempt in sorted(firsts, reverse=True):
        superseded[attempt] = first_of_newer
        first_of_newer = min(first_of_newer, firsts[attempt])
    return superseded


def surviving(records: Iterable[N], firsts: Mapping[int, int]) -> list[N]:
    """Return the records, of all attempts, that no newer attempt superseded."""
    superseded = superseded_from(firsts)
    return [record for record in records if record.step < superseded[record.attempt]]
