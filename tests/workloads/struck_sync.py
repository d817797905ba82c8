"""Syncs a run with MLflow again and again, and is killed at each kind of call to MLflow.

Run as a script, with the Python that has MLflow: `struck_sync.py STORAGE RUN NUM_KILLS`. It goes on
until its standard input has ended and it was killed so often, and prints how often it was.
"""

import os
import select
import signal
import sys
from itertools import count
from typing import Any

import mlflow  # noqa: F401 - once, not in each child

from prefect_torch_ddp.tracking.runs import storage_of
from prefect_torch_ddp.tracking.trackers import sync
from prefect_torch_ddp.tracking.trackers.mlflow_tracker import MlflowTracker

NUM_POINTS = 8
sync.MAX_POINTS = 20
"""So that there are many calls."""


class Struck:
    """MLflow's client, with a kill before or after one of its calls."""

    def __init__(self, client: Any, number: int, *, is_after: bool) -> None:
        self._client, self._left, self._is_after = client, number, is_after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left < 0 and not self._is_after:
                os.kill(os.getpid(), signal.SIGKILL)
            value = method(*args, **options)
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        return call


def main(place: str, run_id: str, least: str) -> None:
    """Be killed, as often as there is time for; each of our children syncs once."""
    num_kills = 0
    for turn in count():
        has_ended = bool(select.select([sys.stdin], [], [], 0)[0])
        if has_ended and num_kills >= int(least):
            print(num_kills)
            return
        if (pid := os.fork()) == 0:
            storage = storage_of(place)
            tracker = MlflowTracker(storage)
            number, is_after = divmod(turn % (2 * NUM_POINTS), 2)
            tracker._client = Struck(tracker._client, 2 + number, is_after=bool(is_after))
            sync.sync_run(storage, run_id, tracker)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status not in (0, signal.SIGKILL):
            sys.exit(f"a sync failed: {status}")
        num_kills += status == signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
