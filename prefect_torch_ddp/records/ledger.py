"""The ledger of a run: which samples each rank trained on in each step, and the check of it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from prefect_torch_ddp.records.reading import list_parts, read_parts, superseded_from
from prefect_torch_ddp.results import EpochLedger, LedgerReport
from prefect_torch_ddp.storage.formats import LEDGER, build
from prefect_torch_ddp.storage.protocol import Storage

MAX_EXAMPLES = 5


@dataclass(frozen=True)
class Line:
    """What all lines of the ledger say."""

    step: int
    """The step that was done; of a loop's beginning or end, the step that would be next."""
    epoch: int
    loop: int
    """Which call of `ctx.steps` it is, from 0."""
    offset: int
    """Samples of the epoch that come before."""
    rank: int = field(default=0, kw_only=True)
    attempt: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class LoopLine(Line):
    """A loop over optimizer steps begins, or resumes."""

    num_samples: int
    """Of the dataset."""
    global_batch_size: int
    drop_last: bool
    world_size: int
    is_drawn: bool = field(default=False, kw_only=True)
    """Whether samples are drawn by weights, or come in an order of the user's own: one may come
    several times, or not at all."""
    num_places: int | None = field(default=None, kw_only=True)
    """Samples of an epoch in an order of the user's own; None: as many as there are."""

    @property
    def num_left_out(self) -> int:
        """Samples of an epoch's tail that are left out."""
        return self._num_all % self.global_batch_size if self.drop_last else 0

    @property
    def num_due(self) -> int:
        """Samples of a whole epoch."""
        return self._num_all - self.num_left_out

    @property
    def _num_all(self) -> int:
        return self.num_samples if self.num_places is None else self.num_places


@dataclass(frozen=True)
class StepLine(Line):
    """The samples one rank trained on in one step; `offset` is the global batch's."""

    num_global: int
    """Samples of the global batch, over all ranks."""
    is_last: bool
    """Whether the global batch is the last one of its epoch."""
    samples: Sequence[int]


@dataclass(frozen=True)
class EndLine(Line):
    """A loop ended in order: no line of it before this offset may be missing."""


def read_ledger(storage: Storage, run_id: str) -> LedgerReport:
    """Check the ledger of a run; see `prefect_torch_ddp.read_ledger`.

    Raises:
        StorageError: the storage can't be read.
    """
    parts = list_parts(storage, run_id, "ledger")
    # Steps only grow, so the first part of each rank has its attempt's first step.
    first_parts = {part.key.rpartition("-")[0]: part for part in reversed(parts)}
    firsts = first_steps(read_parts(storage, list(first_parts.values()), LEDGER, _parse))
    return check_ledger(run_id, firsts, read_parts(storage, parts, LEDGER, _parse))


def _parse(line: dict[str, Any]) -> Line:
    if "samples" in line:
        return build(StepLine, line)
    return build(LoopLine if "num_samples" in line else EndLine, line)


def first_steps(lines: Iterable[Line]) -> dict[int, int]:
    """Return the first step of every attempt."""
    firsts: dict[int, int] = {}
    for line in lines:
        firsts[line.attempt] = min(line.step, firsts.get(line.attempt, line.step))
    return firsts


def check_ledger(run_id: str, firsts: Mapping[int, int], lines: Iterable[Line]) -> LedgerReport:
    """Check the lines of all attempts, in any order, given each attempt's first step."""
    superseded = superseded_from(firsts)
    found = _Found()
    for line in lines:
        if line.step < superseded.get(line.attempt, 0):
            found.add(line)
    return LedgerReport(
        run_id=run_id, epochs=tuple(map(found.check, found.epochs())), attempts=found.sizes()
    )


@dataclass
class _Tally:
    """What the lines of one epoch add up to."""

    last_offset: int | None = None
    """Of the epoch's last global batch, once it was seen."""
    counts: bytearray = field(default_factory=bytearray)
    """For each id 0, 1, or 2 for any more."""
    again: dict[int, int] = field(default_factory=dict)
    """Some ids that were seen again, each with the step."""
    negative: set[int] = field(default_factory=set)
    batches: dict[int, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))
    """By its offset, how many samples a global batch has, and how many are on record."""

    @property
    def is_finished(self) -> bool:
        return self.last_offset is not None and self.is_whole(self.last_offset)

    @property
    def num_draws(self) -> int:
        return sum(min(pair) for pair in self.batches.values())

    @property
    def num_seen(self) -> int:
        return len(self.counts) - self.counts.count(0)

    def is_whole(self, offset: int) -> bool:
        num_global, num_found = self.batches[offset]
        return num_found >= num_global

    def add(self, line: StepLine) -> None:
        self.last_offset = line.offset if line.is_last else self.last_offset
        _, num_found = self.batches[line.offset]
        self.batches[line.offset] = (line.num_global, num_found + len(line.samples))
        self.counts.extend(bytes(max(0, max(line.samples, default=-1) + 1 - len(self.counts))))
        for sample in line.samples:
            if sample < 0:
                self.negative.add(sample)
                continue
            if self.counts[sample] and len(self.again) < MAX_EXAMPLES:
                self.again[sample] = line.step
            self.counts[sample] = 2 if self.counts[sample] else 1

    def gaps(self, begins_at: int, end: int | None) -> int:
        """Count the samples missing of an epoch that was cut off at `end`.

        Without a known end, ranks may have died before they wrote down what follows the last
        whole global batch; that isn't missing.
        """
        offsets = sorted(self.batches)
        while end is None and offsets and not self.is_whole(offsets[-1]):
            offsets.pop()
        num_missing, done = 0, begins_at
        for offset in offsets:
            num_global, num_found = self.batches[offset]
            num_missing += max(0, offset - done) + max(0, num_global - num_found)
            done = offset + num_global
        return num_missing + max(0, (end or 0) - done)

    def num_again(self, begins_at: int) -> int:
        """Count the draws that were made again."""
        num, done = 0, begins_at
        for offset, (num_global, num_found) in sorted(self.batches.items()):
            num += max(0, done - offset) + max(0, num_found - num_global)
            done = max(done, offset + num_global)
        return num

    def first_absent(self, num_samples: int) -> tuple[int, ...]:
        """Return the first ids that were never seen."""
        found: list[int] = []
        at = self.counts.find(0)
        while 0 <= at < num_samples and len(found) < MAX_EXAMPLES:
            found.append(at)
            at = self.counts.find(0, at + 1)
        found += range(len(self.counts), num_samples)[: MAX_EXAMPLES - len(found)]
        return tuple(found)


@dataclass
class _Found:
    """The lines that count."""

    loops: list[LoopLine] = field(default_factory=list)
    ends: list[EndLine] = field(default_factory=list)
    tallies: dict[int, _Tally] = field(default_factory=dict)
    attempts: set[int] = field(default_factory=set)
    """Those that did steps."""

    def add(self, line: Line) -> None:
        if isinstance(line, LoopLine):
            self.loops.append(line)
        elif isinstance(line, EndLine):
            self.ends.append(line)
        elif isinstance(line, StepLine):
            self.tallies.setdefault(line.epoch, _Tally()).add(line)
            self.attempts.add(line.attempt)

    def sizes(self) -> dict[int, int]:
        """Return the world size of each attempt that did steps."""
        sizes = {line.attempt: line.world_size for line in self.loops}
        return {attempt: sizes.get(attempt, 0) for attempt in sorted(self.attempts)}

    def epochs(self) -> Sequence[int]:
        """Return all epochs from the first to the last, also those without any line left."""
        if not self.loops:
            return sorted(self.tallies)
        ended = [line.epoch if line.offset else line.epoch - 1 for line in self.ends]
        return range(min(line.epoch for line in self.loops), max([0, *self.tallies, *ended]) + 1)

    def check(self, epoch: int) -> EpochLedger:
        tally = self.tallies.get(epoch, _Tally())
        is_finished = tally.is_finished
        loop = self._loop_of(epoch)
        if loop is None:
            return EpochLedger(
                epoch=epoch, num_samples=tally.num_seen, num_total=0, is_finished=is_finished
            )
        first = min(self.loops, key=lambda line: (line.step, line.attempt))
        begins_at = first.offset if first.epoch == epoch else 0
        beyond = [i for i in range(loop.num_samples, len(tally.counts)) if tally.counts[i]]
        num_seen = tally.num_seen - len(beyond)
        unknown = [*sorted(tally.negative), *beyond]
        is_due = is_finished or self._is_past(epoch, loop)
        if loop.is_drawn:
            end = loop.num_due if is_due else self._end_in(epoch, loop)
            found = _found_of_draws(tally, begins_at, end) | {"num_draws_due": loop.num_due}
        else:
            num_gaps = None if is_due else tally.gaps(begins_at, self._end_in(epoch, loop))
            found = _found_of_samples(tally, loop, loop.num_due - begins_at, num_seen, num_gaps)
        return EpochLedger(
            epoch=epoch,
            num_samples=num_seen,
            num_total=loop.num_samples,
            is_finished=is_finished,
            begins_at=begins_at,
            num_left_out=loop.num_left_out if is_finished else 0,
            num_unknown=len(unknown),
            unknown=tuple(unknown[:MAX_EXAMPLES]),
            **found,
        )

    @cached_property
    def _newest_whole(self) -> int:
        """The last epoch with a whole global batch; of later ones ranks may have died writing."""
        whole = [
            epoch
            for epoch, tally in self.tallies.items()
            if any(map(tally.is_whole, tally.batches))
        ]
        return max(whole, default=0)

    def _loop_of(self, epoch: int) -> LoopLine | None:
        """Return the newest description of the loop that an epoch belongs to."""
        before = [line for line in self.loops if line.epoch <= epoch]
        return max(
            before, key=lambda line: (line.epoch, line.step, line.attempt, line.loop), default=None
        )

    def _is_past(self, epoch: int, loop: LoopLine) -> bool:
        """Tell whether the loop came to a later epoch, and so must be through with this one.

        Only if the user leaves the loop, or it ends, is an epoch cut off.
        """
        if any(line.loop == loop.loop and line.epoch > epoch for line in self.ends):
            return True
        later = self._loop_of(epoch + 1)
        return later is not None and later.loop == loop.loop and self._newest_whole > epoch

    def _end_in(self, epoch: int, loop: LoopLine) -> int | None:
        ends = [line.offset for line in self.ends if (line.loop, line.epoch) == (loop.loop, epoch)]
        return max(ends, default=None)


def _found_of_samples(
    tally: _Tally, loop: LoopLine, num_due: int, num_seen: int, num_gaps: int | None
) -> dict[str, Any]:
    """Return what is missing, or came again, of an epoch that has each sample once.

    Args:
        tally: of the epoch.
        loop: that it belongs to.
        num_due: samples.
        num_seen: different samples of the dataset.
        num_gaps: what is missing of an epoch under way, or cut off; None: it is through.
    """
    names_missing = num_gaps is None and num_due == loop.num_samples
    return {
        "num_missing": max(0, num_due - num_seen) if num_gaps is None else num_gaps,
        "missing": tally.first_absent(loop.num_samples) if names_missing else (),
        "num_repeated": tally.counts[: loop.num_samples].count(2),
        "repeated": tuple(tally.again),
        "repeated_in": tuple(tally.again.values()),
    }


def _found_of_draws(tally: _Tally, begins_at: int, end: int | None) -> dict[str, Any]:
    """Return what is missing, or was made again, of an epoch's draws up to `end`."""
    num_missing = tally.gaps(begins_at, end)
    return {
        "num_draws": tally.num_draws,
        "num_missing": num_missing,
        "num_repeated": tally.num_again(begins_at),
    }
