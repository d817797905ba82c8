"""Keep a tracker up to date with a run while it trains, by looking at its storage."""

import logging
from collections.abc import Callable

from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix, is_manifest
from prefect_torch_ddp.errors import NewerFormatError, StorageError, TrackerError
from prefect_torch_ddp.records.run_record import RunRecord, read_run_record
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.trackers.history import HistoryReader
from prefect_torch_ddp.tracking.trackers.sync import Synced, send_history
from prefect_torch_ddp.tracking.trackers.tracker import Tracker

INTERVAL_S = 2.0

logger = logging.getLogger(__name__)


class FollowedRun:
    """A run, and the tracker that is kept up to date with it."""

    def __init__(
        self, storage: Storage, run_id: str, tracker: Tracker, experiment: str | None = None
    ) -> None:
        """Make it; nothing is read or sent yet.

        Args:
            storage: where the run is.
            run_id: which run.
            tracker: where to.
            experiment: of the run, if it is known.
        """
        self.run_id, self.tracker = run_id, tracker
        self.is_whole = False
        """Whether the run has completed, and the tracker has all of it."""
        self.has_failed = False
        """Whether it failed or was cancelled, and its task isn't tried again."""
        self._storage, self._experiment = storage, experiment
        self._reader = HistoryReader(storage, run_id, experiment)
        self._synced: object = None

    def look(self, *, is_last: bool = False) -> Synced | None:
        """Sync if there is a new checkpoint or state; None: there is none, or it has to wait.

        Args:
            is_last: nobody will look again, so that nothing waits for the run's end.

        Raises:
            InvalidParamsError: there is no record of the run.
            StorageError, TrackerError: it can be tried again.
        """
        record = read_run_record(self._storage, self.run_id, self._experiment)
        self._experiment = record.experiment
        is_whole = record.is_finished
        has_failed = record.is_over and record.state != "completed"
        now, done = self._state_of(record), None
        waits = self.tracker.is_written_anew and not (is_whole or has_failed or is_last)
        if now != self._synced and not waits:
            done = send_history(self._reader.read(), self.tracker)
            self._synced = now
        self.is_whole, self.has_failed = is_whole, has_failed
        return done

    def _state_of(self, record: RunRecord) -> object:
        manifests = [each.key for each in self._storage.list(checkpoints_prefix(self.run_id))]
        # These change while it trains, and no tracker is told of them.
        told = record.model_copy(update={"metrics": {}, "attempts": (), "goodput": None})
        return [key for key in manifests if is_manifest(key)], told.to_bytes()


def follow_run(
    storage: Storage,
    run_id: str,
    tracker: Tracker,
    *,
    wait: Callable[[float], object],
    on_synced: Callable[[Synced], object],
) -> None:
    """Sync whenever there is a new checkpoint or state, until the run has ended.

    A run that failed or was cancelled has ended if its task isn't retried; a warning says so. While
    the tracker or the storage fails, it is tried again, with a warning at the first time.

    Args:
        storage: where the run is.
        run_id: which run.
        tracker: where to.
        wait: waits for so many seconds.
        on_synced: gets what each sync did.

    Raises:
        InvalidParamsError: there is no record of the run.
        NewerFormatError: a later version wrote the record, or what the tracker keeps.
    """
    run = FollowedRun(storage, run_id, tracker)
    is_failing = False
    while not (run.is_whole or run.has_failed):
        try:
            if (synced := run.look()) is not None:
                on_synced(synced)
            is_failing = False
        except NewerFormatError:
            raise  # trying again changes nothing
        except (StorageError, TrackerError) as error:
            if not is_failing:
                logger.warning("%s; it is tried again", error)
            is_failing = True
        if not (run.is_whole or run.has_failed):
            wait(INTERVAL_S)
    if run.has_failed:
        words = "run %s has ended without completing; if it is continued, sync it again"
        logger.warning(words, run_id)
