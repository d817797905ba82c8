"""Bring a tracker up to date with what a run has on record, once and only once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.trackers.history import History, HistoryReader, Point
from prefect_torch_ddp.tracking.trackers.tracker import Tracker

MAX_POINTS = 1000
"""Of a request: MLflow takes no more."""


@dataclass(frozen=True)
class Synced:
    """What a tracker has now."""

    num_sent: int
    """Points that it hadn't before."""
    step: int
    """Up to which it has all; -1: no step with metrics is final."""
    is_completed: bool
    """Whether the training has, so that all its steps are final."""
    is_again: bool
    """Whether the tracker's run was begun again: steps that it had were taken back."""


def sync_run(
    storage: Storage, run_id: str, tracker: Tracker, experiment: str | None = None
) -> Synced:
    """Send a tracker what it hasn't yet of the steps that no resume takes back any more.

    May be stopped anywhere and called again: what the tracker has is asked of the tracker. Two
    calls at a time for the same run and tracker aren't supported.

    Args:
        storage: where the run is.
        run_id: which run.
        tracker: where to.
        experiment: of the run, if it is known.

    Raises:
        InvalidParamsError: there is no record of the run.
        StorageError: the storage can't be read.
        TrackerError: the tracker doesn't answer, or refuses.
    """
    return send_history(HistoryReader(storage, run_id, experiment).read(), tracker)


def send_history(history: History, tracker: Tracker) -> Synced:
    """Send a tracker what it hasn't yet of a history that was read; see `sync_run`."""
    position = tracker.open(history.record, sorted(history.steps.metrics))
    mark = history.mark
    # A checkpoint that is damaged later lets a training resume from one before what was sent.
    is_again = position.mark is not None and position.mark != history.mark_at(position.mark.step)
    if is_again:
        tracker.begin_again(history.record)
    elif position.mark is not None and position.mark.step > mark.step:
        mark = position.mark  # what made these steps final is gone, and they still count
    has_all = position.mark == mark and position.has_record
    begins = is_again or (tracker.is_written_anew and not has_all)
    last_steps = {} if begins else position.last_steps
    if begins or position.mark is None or position.mark.step < mark.step:
        # Before the points: whatever part of them arrives, the mark then says of which history.
        tracker.put_mark(mark)
    num_sent = 0
    for batch in _batches(_missing(history, last_steps, mark.step)):
        tracker.send(batch)
        num_sent += len(batch)
    tracker.describe(history.record)
    return Synced(num_sent, mark.step, is_completed=history.end is None, is_again=is_again)


def _missing(history: History, last_steps: Mapping[str, int], up_to: int) -> Iterator[Point]:
    for metric in sorted(history.steps.metrics):
        yield from history.points(metric, last_steps.get(metric, -1), up_to)


def _batches(points: Iterator[Point]) -> Iterator[list[Point]]:
    """Yield batches that don't part a metric's points of one step.

    Else a stop between two would lose the second, for the tracker has that step already.
    """
    batch: list[Point] = []
    for _, group in groupby(points, attrgetter("metric", "step")):
        together = list(group)
        if batch and len(batch) + len(together) > MAX_POINTS:
            yield batch
            batch = []
        batch += together
    if batch:
        yield batch
