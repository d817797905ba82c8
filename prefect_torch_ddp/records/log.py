"""Owns how the records of one rank reach the storage: batched, in the background, none lost at
exit or by a kill.

Owns the lines in which a rank's metrics reach the storage.
"""

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.records.batch import RecordBatch, part_key, put_part
from prefect_torch_ddp.storage.protocol import Storage

LONG_INTERVAL_S, LONGEST_INTERVAL_S = 30.0, 300.0
SHARE_OF_AGE = 1 / 64
NUM_LAST_TRIES = 3
PAUSE_S = 0.2

logger = logging.getLogger(__name__)


class RecordLog:
    """Appends records to `<folder>/rank-00000/<attempt>-<part>.jsonl`.

    While the storage fails, records are kept and tried again. Those that no part holds yet are
    in a file as well, if there is a folder for it: whoever kills this process finds them there.
    """

    def __init__(  # noqa: PLR0913 - what is written, by whom, and where to, all by name
        self,
        storage: Storage,
        folder: str,
        *,
        rank: int,
        attempt: int,
        what: str,
        to_line: Callable[[Mapping[str, Any]], str],
        is_ready: Callable[[Mapping[str, Any]], bool] = lambda _: True,
        first_interval_s: float = 1.0,
        copies: Path | None = None,
    ) -> None:
        """Make it; the background thread starts with the first record.

        Args:
            storage: where to.
            folder: the key of the folder of all ranks.
            rank: which rank writes.
            attempt: in which attempt.
            what: what the records are, for messages: "metric".
            to_line: makes a record a line of JSON with its line end; may wait for one that
                isn't ready.
            is_ready: tells whether a record can be made a line without waiting.
            first_interval_s: seconds until the first part.
            copies: the folder for what isn't written yet; see `record_batch.left_behind`.
        """
        self._storage = storage
        self._prefix = f"{folder}/rank-{rank:05d}/{attempt:06d}-"
        self._what = what
        self._to_line = to_line
        self._is_ready = is_ready
        self._first_interval_s = first_interval_s
        self._copies = copies
        self._waiting: deque[Mapping[str, Any]] = deque()
        """Records that a device still computes, and those behind them."""
        self._num_batches = 0
        self._growing = self._new_batch()
        self._next_key = part_key(self._prefix, 1)
        self._full: RecordBatch | None = None
        """What is being written; after an error the same again."""
        self._taking = threading.Lock()
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Take a record; it must not change any more."""
        with self._taking:
            self._waiting.append(record)
            while self._waiting and self._is_ready(self._waiting[0]):
                self._take_first()
        if self._thread is None:
            name = f"prefect-torch-ddp-{self._what}-records"
            self._thread = threading.Thread(target=self._write_parts, name=name, daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Write what was appended before; raises StorageError, and keeps what it couldn't
        write.
        """
        with self._writing:
            self._wait_for_all()
            if self._full is not None:
                self._write_full()
            with self._taking:
                if not self._growing.num_records:
                    return
                self._full, self._growing = self._growing, self._new_batch()
            self._write_full()

    def close(self) -> None:
        """Write all that is left.

        Raises:
            StorageError: it can't be written, after a few tries.
        """
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join()
        self._thread = None
        tries_left = NUM_LAST_TRIES
        while self._num_pending:
            try:
                self.flush()
            except StorageError as error:
                tries_left -= 1
                if tries_left == 0:
                    msg = f"{self._num_pending} {self._what} records could not be written to {self._next_key}: {error}"
                    raise StorageError(msg) from error
                threading.Event().wait(PAUSE_S)

    @property
    def _num_pending(self) -> int:
        return (
            len(self._waiting)
            + self._growing.num_records
            + (self._full.num_records if self._full is not None else 0)
        )

    def _write_parts(self) -> None:
        is_failing, began_s, interval_s = False, time.monotonic(), self._first_interval_s
        while not self._closing.wait(interval_s):
            interval_s = next_interval_s(interval_s, time.monotonic() - began_s)
            try:
                self.flush()
                is_failing = False
            except Exception as error:  # noqa: BLE001 - the training goes on; close() raises what lasts
                if not is_failing:
                    words = "%s records can't be written to %s, and are kept to try again: %s"
                    logger.warning(words, self._what, self._next_key, error)
                is_failing = True

    def _wait_for_all(self) -> None:
        """Take all records that wait; not under the lock, since the step must not wait for
        them.
        """
        while True:
            with self._taking:
                if not self._waiting:
                    return
                first = self._waiting[0]
            self._to_line(first)  # waits
            with self._taking:
                if self._waiting and self._waiting[0] is first:
                    self._take_first()

    def _take_first(self) -> None:
        self._growing.add(self._to_line(self._waiting[0]).encode())
        self._waiting.popleft()

    def _write_full(self) -> None:
        assert self._full is not None
        written = put_part(self._storage, self._next_key, self._full.content())
        self._full.drop()
        self._full = None
        self._next_key = part_key(
            self._prefix, int(written[len(self._prefix) :].partition(".")[0]) + 1
        )

    def _new_batch(self) -> RecordBatch:
        self._num_batches += 1
        return RecordBatch(
            self._copies and self._copies / part_key(self._prefix, self._num_batches)
        )


def next_interval_s(interval_s: float, age_s: float) -> float:
    """Return how long to wait for the next part: 1, 2, 4 ... 30 seconds, later longer, at most
    five minutes.

    So a short run shows its records soon, a long one to a 64th of its age, and a day of it
    leaves some 440 objects a rank, beside one for each checkpoint.

    Args:
        interval_s: how long was waited last.
        age_s: of the log.
    """
    return min(2 * interval_s, max(LONG_INTERVAL_S, min(age_s * SHARE_OF_AGE, LONGEST_INTERVAL_S)))


_encode = json.JSONEncoder(
    allow_nan=False
).encode  # made once: json.dumps would make one for each record


class MetricLog(RecordLog):
    """Appends records to `runs/<run_id>/metrics/rank-00000/<attempt>-<part>.jsonl`.

    A record's metrics may be anything that `float()` takes. One that says by `is_ready()` that
    it isn't yet is waited for in the background.
    """

    def __init__(
        self, storage: Storage, run_id: str, rank: int, attempt: int, **options: Any
    ) -> None:
        """Make it; nothing is written yet.

        See RecordLog for the options: first_interval_s and copies.
        """
        super().__init__(
            storage,
            f"runs/{run_id}/metrics",
            rank=rank,
            attempt=attempt,
            what="metric",
            to_line=_line,
            is_ready=_is_ready,
            **options,
        )


def _is_ready(record: Mapping[str, Any]) -> bool:
    return all(
        isinstance(value, float) or getattr(value, "is_ready", lambda: True)()
        for value in record["metrics"].values()
    )


def _line(record: Mapping[str, Any]) -> str:
    metrics = {name: _json_number(float(value)) for name, value in record["metrics"].items()}
    return _encode({**record, "metrics": metrics}) + "\n"


def _json_number(value: float) -> float | str:
    return (
        value if math.isfinite(value) else str(value)
    )  # JSON has no nan; float() reads the text back
