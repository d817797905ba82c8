"""Owns the ledger of a run: the record of which samples each rank trained on in each step, and
how it is read back.

Owns the check of a ledger: pure, from the lines that ranks wrote to what is missing or was
taken twice.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from prefect_torch_ddp.records.log import RecordLog
from prefect_torch_ddp.records.parts import first_steps, read_parts, record_parts, superseded_from
from prefect_torch_ddp.results import EpochLedger, LedgerReport
from prefect_torch_ddp.storage.protocol import Storage, StoredObject

MAX_EXAMPLES = 5


@dataclass(frozen=True)
class LoopLine:
    """What a loop over optimizer steps goes over, and where an attempt begins or goes on in
    it.
    """

    step: int
    """The first step it is to do."""
    epoch: int
    loop: int
    """Which call of `ctx.steps` it is, from 0."""
    place: int
    """Samples of the epoch that are done before."""
    num_samples: int
    """Of the dataset."""
    global_batch_size: int
    drop_last: bool
    world_size: int
    rank: int = 0
    attempt: int = 0

    @property
    def num_due(self) -> int:
        """Samples of a whole epoch."""
        return self.num_samples - (
            self.num_samples % self.global_batch_size if self.drop_last else 0
        )


@dataclass(frozen=True)
class StepLine:
    """Which samples one rank trained on in one step."""

    step: int
    epoch: int
    loop: int
    place: int
    """Of the global batch's first sample in the order of the epoch."""
    num_global: int
    """Samples of the global batch, over all ranks."""
    is_last: bool
    """Whether the global batch is the last one of its epoch."""
    samples: Sequence[int]
    rank: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class EndLine:
    """Where a loop ended in order: no line of it before this place may be missing."""

    step: int
    """The one that would be next."""
    epoch: int
    """Of the next sample."""
    place: int
    """Samples of that epoch that are done."""
    loop: int
    rank: int = 0
    attempt: int = 0


def check_ledger(
    run_id: str, firsts: Mapping[int, int], lines: Iterable[LoopLine | StepLine | EndLine]
) -> LedgerReport:
    """Check the lines of all attempts, in any order.

    Args:
        run_id: the run that they belong to.
        firsts: the first step of every attempt; lines of others are left out.
        lines: may be read only once.
    """
    superseded = superseded_from(firsts)
    found = _Found()
    for line in lines:
        if line.step < superseded.get(line.attempt, 0):
            found.add(line)
    return LedgerReport(
        run_id=run_id, epochs=tuple(map(found.check, found.epochs())), attempts=found.sizes()
    )


@dataclass
class _Found:
    """The lines that count."""

    loops: list[LoopLine] = field(default_factory=list)
    ends: list[EndLine] = field(default_factory=list)
    tallies: dict[int, "_Tally"] = field(default_factory=dict)
    attempts: set[int] = field(default_factory=set)
    """Those that did steps."""

    def add(self, line: LoopLine | StepLine | EndLine) -> None:
        if isinstance(line, LoopLine):
            self.loops.append(line)
        elif isinstance(line, EndLine):
            self.ends.append(line)
        else:
            self.tallies.setdefault(line.epoch, _Tally()).add(line)
            self.attempts.add(line.attempt)

    def sizes(self) -> dict[int, int]:
        sizes = {line.attempt: line.world_size for line in self.loops}
        return {attempt: sizes.get(attempt, 0) for attempt in sorted(self.attempts)}

    def epochs(self) -> Sequence[int]:
        """Return all epochs from the first to the last one, also those of which no line is
        left.
        """
        if not self.loops:
            return sorted(self.tallies)
        ended = [line.epoch if line.place else line.epoch - 1 for line in self.ends]
        return range(min(line.epoch for line in self.loops), max([0, *self.tallies, *ended]) + 1)

    @cached_property
    def newest_whole(self) -> int:
        """Return the last epoch with a whole global batch: of what follows, not all ranks may
        have written before they died.
        """
        return max(
            (
                epoch
                for epoch, tally in self.tallies.items()
                if any(map(tally.is_whole, tally.batches))
            ),
            default=0,
        )

    def check(self, epoch: int) -> EpochLedger:
        tally = self.tallies.get(epoch, _Tally())
        loop = self._loop_of(epoch)
        if loop is None:
            num_seen = len(tally.counts) - tally.counts.count(0)
            return EpochLedger(
                epoch=epoch, num_samples=num_seen, num_total=0, is_finished=tally.is_finished
            )
        first = min(self.loops, key=lambda line: (line.step, line.attempt))
        begins_at = first.place if first.epoch == epoch else 0
        counts = tally.counts[: loop.num_samples]
        num_seen = len(counts) - counts.count(0)
        is_due = tally.is_finished or self._is_past(epoch, loop)
        num_due = loop.num_due - begins_at
        unknown = sorted(tally.negative) + [
            i for i in range(loop.num_samples, len(tally.counts)) if tally.counts[i]
        ]
        return EpochLedger(
            epoch=epoch,
            num_samples=num_seen,
            num_total=loop.num_samples,
            is_finished=tally.is_finished,
            begins_at=begins_at,
            num_left_out=loop.num_samples - loop.num_due if tally.is_finished else 0,
            num_missing=max(0, num_due - num_seen)
            if is_due
            else _gaps(tally.batches, begins_at, self._end_in(epoch, loop)),
            missing=_first_absent(counts, loop.num_samples)
            if is_due and num_due == loop.num_samples
            else (),
            num_repeated=counts.count(2),
            repeated=tuple(tally.again),
            repeated_in=tuple(tally.again.values()),
            num_unknown=len(unknown),
            unknown=tuple(unknown[:MAX_EXAMPLES]),
        )

    def _loop_of(self, epoch: int) -> LoopLine | None:
        """Return the newest description of the loop that an epoch belongs to."""
        before = [line for line in self.loops if line.epoch <= epoch]
        return max(
            before, key=lambda line: (line.epoch, line.step, line.attempt, line.loop), default=None
        )

    def _is_past(self, epoch: int, loop: LoopLine) -> bool:
        """Tell whether the loop went on to a later epoch: it goes through one before it begins
        the next.

        Only the user's leaving the loop, or its end, cuts an epoch off.
        """
        if any(line.loop == loop.loop and line.epoch > epoch for line in self.ends):
            return True
        later = self._loop_of(epoch + 1)
        return later is not None and later.loop == loop.loop and self.newest_whole > epoch

    def _end_in(self, epoch: int, loop: LoopLine) -> int | None:
        places = [line.place for line in self.ends if (line.loop, line.epoch) == (loop.loop, epoch)]
        return max(places, default=None)


@dataclass
class _Tally:
    """What the lines of one epoch add up to."""

    last_place: int | None = None
    """Of the epoch's last global batch, once it was seen."""
    counts: bytearray = field(default_factory=bytearray)
    """For each id 0, 1, or 2 for any more."""
    again: dict[int, int] = field(default_factory=dict)
    """Some ids that were seen again, each with the step."""
    negative: set[int] = field(default_factory=set)
    batches: dict[int, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))
    """For each global batch, by its place: how many samples it has, and how many are on
    record."""

    @property
    def is_finished(self) -> bool:
        return self.last_place is not None and self.is_whole(self.last_place)

    def is_whole(self, place: int) -> bool:
        """Tell whether all samples of a global batch are on record."""
        num_global, num_found = self.batches[place]
        return num_found >= num_global

    def add(self, line: StepLine) -> None:
        self.last_place = line.place if line.is_last else self.last_place
        _, num_found = self.batches[line.place]
        self.batches[line.place] = (line.num_global, num_found + len(line.samples))
        if line.samples:
            self.counts.extend(bytes(max(0, max(line.samples) + 1 - len(self.counts))))
        for sample in line.samples:
            if sample < 0:
                self.negative.add(sample)
                continue
            if self.counts[sample] and len(self.again) < MAX_EXAMPLES:
                self.again[sample] = line.step
            self.counts[sample] = 2 if self.counts[sample] else 1


def _gaps(batches: Mapping[int, tuple[int, int]], begins_at: int, end: int | None) -> int:
    """Count the samples that are missing of an epoch that was cut off.

    Args:
        batches: see _Tally.
        begins_at: the first place that is due.
        end: the place where the loop ended; None: it is not known to have ended, and what
            follows the last global batch that is whole was perhaps done and not written down by
            all ranks when they died.
    """
    places = sorted(batches)
    while end is None and places and batches[places[-1]][1] < batches[places[-1]][0]:
        places.pop()
    num_missing, done = 0, begins_at
    for place in places:
        num_global, num_found = batches[place]
        num_missing += max(0, place - done) + max(0, num_global - num_found)
        done = place + num_global
    return num_missing + max(0, (end or 0) - done)


def _first_absent(counts: bytearray, num_samples: int) -> tuple[int, ...]:
    """Return the first ids that were never seen."""
    found: list[int] = []
    at = counts.find(0)
    while at >= 0 and len(found) < MAX_EXAMPLES:
        found.append(at)
        at = counts.find(0, at + 1)
    found += range(len(counts), num_samples)[: MAX_EXAMPLES - len(found)]
    return tuple(found)


_encode = json.JSONEncoder(
    separators=(",", ":")
).encode  # made once: json.dumps would make one for each line


class LedgerLog(RecordLog):
    """Appends to `runs/<run_id>/ledger/rank-00000/<attempt>-<part>.jsonl`: a line for each step
    and each loop.
    """

    def __init__(
        self, storage: Storage, run_id: str, rank: int, attempt: int, **options: Any
    ) -> None:
        """Make it; nothing is written yet.

        See RecordLog for the options: first_interval_s and copies.
        """
        super().__init__(
            storage,
            _folder(run_id),
            rank=rank,
            attempt=attempt,
            what="ledger",
            to_line=_line,
            **options,
        )
        self._who = {"rank": rank, "attempt": attempt}

    def put(self, line: LoopLine | StepLine | EndLine) -> None:
        """Put a line on record, as this rank's."""
        self.append({**vars(line), **self._who})


def read_ledger(storage: Storage, run_id: str) -> LedgerReport:
    """Check the ledger of a run; see `prefect_torch_ddp.read_ledger`.

    Raises:
        StorageError: the storage can't be read.
    """
    parts = record_parts(storage, _folder(run_id))
    # Steps only grow, so the first part of each rank has its attempt's first step.
    firsts = first_steps(read_parts(storage, _first_parts(parts), _parse))
    return check_ledger(run_id, firsts, read_parts(storage, parts, _parse))


def _first_parts(parts: Sequence[StoredObject]) -> list[StoredObject]:
    first: dict[str, StoredObject] = {}
    for part in parts:
        first.setdefault(part.key.rpartition("-")[0], part)
    return list(first.values())


def _folder(run_id: str) -> str:
    return f"runs/{run_id}/ledger"


def _line(record: Mapping[str, Any]) -> str:
    return _encode(record) + "\n"


def _parse(line: dict[str, Any]) -> LoopLine | StepLine | EndLine:
    if "samples" in line:
        return StepLine(**line)
    return LoopLine(**line) if "num_samples" in line else EndLine(**line)
