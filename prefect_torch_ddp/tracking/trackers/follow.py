"""Keep a tracker up to date with a run while it trains, by looking at its storage."""

import logging
from collections.abc import Callable

from prefect_torch_ddp.checkpoint.keys import checkpoints_prefix, is_manifest
from prefect_torch_ddp.errors import StorageError, TrackerError
from prefect_torch_ddp.records.run_record import RunRecord, read_record
from prefect_torch_ddp.storage.protocol import Storage
from prefect_torch_ddp.tracking.trackers.sync import Synced, sync_run
from prefect_torch_ddp.tracking.trackers.tracker import Tracker

INTERVAL_S = 2.0

logger = logging.getLogger(__name__)


def follow_run(
    storage: Storage,
    run_id: str,
    tracker: Tracker,
    *,
    wait: Callable[[float], object],
    on_synced: Callable[[Synced], object],
) -> None:
    """Sync whenever there is a new checkpoint or state, until the run has completed.

    A run that failed, or was cancelled, may be tried again: it is followed on. While the tracker
    or the storage fails, it is tried again, with a warning at the first time.

    Args:
        storage: where the run is.
        run_id: which run.
        tracker: where to.
        wait: waits for so many seconds.
        on_synced: gets what each sync did.

    Raises:
        InvalidParamsError: there is no record of the run.
    """
    synced: object = None
    is_failing = False
    while True:
        try:
            record = read_record(storage, run_id)
            now = _state_of(storage, record)
            if now != synced:
                on_synced(sync_run(storage, run_id, tracker, record.experiment))
                synced = now
            is_failing = False
            if _is_whole(record):
                return
        except (StorageError, TrackerError) as error:
            if not is_failing:
                logger.warning("%s; it is tried again", error)
            is_failing = True
        wait(INTERVAL_S)


def _state_of(storage: Storage, record: RunRecord) -> object:
    manifests = [each.key for each in storage.list(checkpoints_prefix(record.run_id))]
    return [key for key in manifests if is_manifest(key)], record.to_bytes()


def _is_whole(record: RunRecord) -> bool:
    # A run of train_flow, which has a dataset, is evaluated after its training.
    is_evaluated = record.evaluation is not None or record.dataset is None
    return record.state == "completed" and is_evaluated
