"""Owns how the records of one rank reach the storage: batched, in the background, none lost at exit."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.protocol import Storage

MAX_INTERVAL_S = 30.0
NUM_LAST_TRIES = 3
PAUSE_S = 0.2

logger = logging.getLogger(__name__)


class RecordLog:
    """Appends records to `<folder>/rank-00000/<attempt>-<part>.jsonl`.

    Parts are written after 1, 2, 4 ... 30 seconds, so that a short run shows its records and a long one doesn't write thousands
    of objects. While the storage fails, records are kept and tried again.
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
        first_interval_s: float = 1.0,
    ) -> None:
        """Make it; the background thread starts with the first record.

        Args:
            storage: where to.
            folder: the key of the folder of all ranks.
            rank: which rank writes.
            attempt: in which attempt.
            what: what the records are, for messages: "metric".
            to_line: makes a record a line of JSON with its line end; called in the background.
            first_interval_s: seconds until the first part.
        """
        self._storage = storage
        self._prefix = f"{folder}/rank-{rank:05d}/{attempt:06d}-"
        self._what = what
        self._to_line = to_line
        self._interval_s = first_interval_s
        self._pending: list[Mapping[str, Any]] = []
        self._part = 0
        self._undecided: tuple[int, bytes] | None = None
        """How many records were last tried, and as what; None once it is known that they arrived."""
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Take a record; it must not change any more."""
        self._pending.append(record)
        if self._thread is None:
            name = f"prefect-torch-ddp-{self._what}-records"
            self._thread = threading.Thread(target=self._write_parts, name=name, daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Write what was appended before; raises StorageError, and keeps what it couldn't write."""
        self._write_part()

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
        while self._pending:
            try:
                self._write_part()
            except StorageError as error:
                tries_left -= 1
                if tries_left == 0:
                    msg = f"{len(self._pending)} {self._what} records could not be written to {self._next_key()}: {error}"
                    raise StorageError(msg) from error
                threading.Event().wait(PAUSE_S)

    def _write_parts(self) -> None:
        is_failing = False
        while not self._closing.wait(self._interval_s):
            self._interval_s = min(2 * self._interval_s, MAX_INTERVAL_S)
            try:
                self._write_part()
                is_failing = False
            except Exception as error:  # noqa: BLE001 - the training goes on; close() raises what lasts
                if not is_failing:
                    words = "%s records can't be written to %s, and are kept to try again: %s"
                    logger.warning(words, self._what, self._next_key(), error)
                is_failing = True

    def _write_part(self) -> None:
        """Write what is pending as one object; on an error it stays pending."""
        with self._writing:
            if not self._pending:
                return
            if self._undecided is None:
                num = len(self._pending)  # only this side removes, so those that are appended meanwhile keep their turn
                self._undecided = num, "".join(self._to_line(record) for record in self._pending[:num]).encode()
            num, data = self._undecided  # the same again: else what arrived though it seemed to fail would be there twice
            while not self._storage.write_if_absent(self._next_key(), data):
                if self._storage.read(self._next_key()) == data:
                    break  # an earlier try arrived though it seemed to fail
                self._part += 1
            self._part += 1
            self._undecided = None
            del self._pending[:num]

    def _next_key(self) -> str:
        return f"{self._prefix}{self._part + 1:06d}.jsonl"
