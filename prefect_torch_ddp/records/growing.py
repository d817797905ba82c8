"""Records of a run that trains, read again and again: of each rank only the parts that are new."""

import numpy as np

from prefect_torch_ddp.records.metrics import ROW, Records, read_new_records
from prefect_torch_ddp.storage.protocol import Storage


class GrowingRecords:
    """What is on record of all attempts, with what ranks measured themselves."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        """Make it; nothing is read yet."""
        self._storage, self._run_id = storage, run_id
        self._known: set[str] = set()
        """Keys of the parts that were read."""
        self._newest: dict[str, str] = {}
        """The last of them, by rank and attempt."""
        self._records = _none()

    def read(self) -> Records:
        """Read what is new, and return all; damaged lines are left out, with a warning.

        Raises:
            NewerFormatError: a part is of a newer format.
            StorageError: the storage can't be read.
        """
        records, newest, known = self._records, self._newest, set(self._known)
        found = read_new_records(self._storage, self._run_id, known)
        new = sorted(known - self._known)
        if any(key < newest.get(_series(key), "") for key in new):
            # An agent may write what a killed rank left, between parts that were read.
            records, newest, known = _none(), {}, set()
            found = read_new_records(self._storage, self._run_id, known)
            new = sorted(known)
        self._known = known
        self._newest = newest | {_series(key): key for key in new}
        if new:
            self._records = _joined(records, found)
        return self._records


def _none() -> Records:
    return Records(np.zeros(0, ROW), {})


def _series(key: str) -> str:
    """Return the rank and the attempt of a part, which is `.../rank-00000/<attempt>-<part>`."""
    return key.rpartition("-")[0]


def _joined(first: Records, second: Records) -> Records:
    """Put the rows of two readings in the order that one reading of all parts has.

    The order matters: means over the ranks are sums of floats.
    """
    rows = np.concatenate([first.rows, second.rows])
    metrics = dict(first.metrics)
    for name, (numbers, values) in second.metrics.items():
        having, before = metrics.get(name, (numbers[:0], values[:0]))
        moved = numbers + len(first)
        metrics[name] = np.concatenate([having, moved]), np.concatenate([before, values])
    order = np.lexsort((rows["attempt"], rows["rank"]))  # stable
    return Records(rows, metrics).reordered(order)
