"""The questions to a tracker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefect_torch_ddp.records.run_record import RunRecord
from prefect_torch_ddp.tracking.trackers.history import Mark, Point


@dataclass(frozen=True)
class TrackerPosition:
    """What a tracker has of a run, as it says itself."""

    mark: Mark | None
    """The last mark that it was given; None: none yet."""
    last_steps: Mapping[str, int]
    """The last step of each metric that it has, by the run's names of the metrics."""
    has_record: bool = True
    """Whether it has everything in the run's record; only known if it is written from the start."""


class Tracker(Protocol):
    """A tracker that holds one run of its own for each run of ours.

    Every method raises TrackerError if the tracker doesn't answer, or refuses, and NewerFormatError
    if a later version of this package wrote what it would change.
    """

    @property
    def name(self) -> str:
        """Its name in words."""

    @property
    def is_written_anew(self) -> bool:
        """Whether it can't be added to.

        Then it gets all points whenever there is something new, and only when a run has ended.
        """

    @property
    def url(self) -> str:
        """Where a person finds the run; empty if there is no such place."""

    def open(self, record: RunRecord, metrics: Sequence[str]) -> TrackerPosition:
        """Find the run, or begin it.

        Args:
            record: of the run.
            metrics: all of its metrics.
        """

    def begin_again(self, record: RunRecord) -> None:
        """Set the run aside, whose steps were taken back, and begin another one."""

    def put_mark(self, mark: Mark) -> None:
        """Keep a mark."""

    def send(self, points: Sequence[Point]) -> None:
        """Add points. Those of a metric come in the order of their steps."""

    def describe(self, record: RunRecord) -> None:
        """Take over what the record says: its state, parameters, evaluation, models, code."""
