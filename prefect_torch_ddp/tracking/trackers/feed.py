"""The process next to a flow that keeps trackers up to date with the flow's runs.

`python -m prefect_torch_ddp.tracking.trackers.feed` reads a pickled `Feed` from its standard
input, and syncs until that ends. After the word `over` it syncs once more. If the input ends
without a word, the flow's process is dead, and this one ends at once.

Each tracker has a thread here, so that one that hangs doesn't delay another. What a thread knows
goes to the standard output, a line of JSON for each change: `Told`.
"""

import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from pydantic_core import from_json, to_json

from prefect_torch_ddp.errors import PrefectTorchDdpError
from prefect_torch_ddp.records.hiding import without_credentials
from prefect_torch_ddp.records.run_record import RunRecord, run_records_since
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.trackers.follow import INTERVAL_S, FollowedRun
from prefect_torch_ddp.tracking.trackers.known import open_tracker

OVER = b"over"
FAIL_SOON = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
"""A tracker that is away is asked again here every 2 s."""
LAST_SYNC_LIMIT_S = 20.0
"""The flow's process, which kills this one sooner, may be killed while it waits."""
NICENESS = 5
"""Ranks may train on this machine."""


@dataclass(frozen=True)
class Feed:
    """Which runs are followed, and by whom."""

    trackers: tuple[str, ...]
    """The runs whose parameters name exactly these."""
    storage: Storage
    experiment: str
    flow_run_id: str
    since: datetime
    """The runs began at this moment or later."""

    def has(self, record: RunRecord) -> bool:
        """Tell whether a run is one of them."""
        asked = tuple(record.parameters.get("trackers", ()))
        return record.flow_run_id == self.flow_run_id and asked == self.trackers


@dataclass(frozen=True)
class Told:
    """What is known of a run and a tracker, or of a tracker and all runs."""

    tracker: str
    run_id: str
    """Empty: of all runs."""
    trouble: str = ""
    """Why the tracker isn't up to date."""
    is_last: bool = False
    """Whether it is after the last sync."""
    url: str = ""
    """The tracker's page of the run."""

    @classmethod
    def read(cls, lines: bytes) -> Iterator["Told"]:
        """Read what such a process has said; a line that was cut is left out."""
        whole = lines[: lines.rfind(b"\n") + 1]
        yield from (cls(**from_json(line)) for line in whole.splitlines())


class Feeder:
    """Keeps one tracker up to date."""

    def __init__(self, feed: Feed, tracker: str, tell: Callable[[Told], object]) -> None:
        """Make it; nothing is read yet."""
        self._feed, self._tracker, self._tell = feed, tracker, tell
        self._runs: dict[str, FollowedRun] = {}
        self._told: dict[str, Told] = {}
        self._known: set[str] = set()

    def work(self, over: threading.Event) -> None:
        """Sync until the flow is over, and once more then."""
        is_last = False
        while not is_last:
            is_last = over.is_set()
            self._say(Told(self._tracker, "", _trouble_of(self._find_runs), is_last))
            for run in self._runs.values():
                if is_last or not run.is_whole:
                    self._look(run, is_last=is_last)
            if not is_last:
                over.wait(INTERVAL_S)

    def _find_runs(self) -> None:
        feed = self._feed
        for record in run_records_since(feed.storage, feed.experiment, feed.since, self._known):
            if feed.has(record):
                tracker = open_tracker(self._tracker, feed.storage)
                at = feed.storage, record.run_id, tracker, feed.experiment
                self._runs[record.run_id] = FollowedRun(*at)
                # The first sync may hang.
                self._say(Told(self._tracker, record.run_id))
            self._known.add(record.key)

    def _look(self, run: FollowedRun, *, is_last: bool) -> None:
        trouble = _trouble_of(partial(run.look, is_last=is_last))
        self._say(Told(self._tracker, run.run_id, trouble, is_last, run.tracker.url))

    def _say(self, told: Told) -> None:
        if self._told.get(told.run_id) != told:
            self._told[told.run_id] = told
            self._tell(told)


def _trouble_of(work: Callable[[], object]) -> str:
    """Do some work with a tracker; return why it failed, or nothing."""
    try:
        work()
    except PrefectTorchDdpError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a tracker's package may raise anything
        return without_credentials(f"{type(error).__name__}: {error}")
    return ""


def main() -> None:
    """Feed the trackers until the flow is over, or dead."""
    os.nice(NICENESS)
    for name, value in FAIL_SOON.items():
        os.environ.setdefault(name, value)
    # What a tracker's package prints isn't for the flow.
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    feed: Feed = pickle.load(sys.stdin.buffer)
    over = threading.Event()

    def tell(told: Told) -> None:
        os.write(answers, to_json(told) + b"\n")

    threads = [
        threading.Thread(target=Feeder(feed, name, tell).work, args=(over,), daemon=True)
        for name in feed.trackers
    ]
    for thread in threads:
        thread.start()
    if sys.stdin.buffer.read() != OVER:
        os._exit(1)
    over.set()
    deadline = time.monotonic() + LAST_SYNC_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    os._exit(any(thread.is_alive() for thread in threads))


if __name__ == "__main__":
    main()
