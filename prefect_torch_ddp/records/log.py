"""How a rank's records reach the storage: in parts, in the background, none lost by a kill."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.protocol import Storage

SUFFIX = ".jsonl"
LONG_INTERVAL_S, LONGEST_INTERVAL_S = 30.0, 300.0
SHARE_OF_AGE = 1 / 64
NUM_LAST_TRIES = 3
PAUSE_S = 0.2

logger = logging.getLogger(__name__)


class RecordLog:
    """Appends records to `<folder>/rank-00000/<attempt>-<part>.jsonl`.

    While the storage fails, records are kept and tried again. Those that no part holds yet are
    in a file as well, where `left_behind` finds them after this process was killed.
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
            what: the records' name in messages: "metric".
            to_line: makes a record a line of JSON; waits for one that isn't ready.
            is_ready: tells whether a record can be made a line without waiting.
            first_interval_s: seconds until the first part.
            copies: the folder for what isn't written yet; None: no copies are kept.
        """
        self._storage = storage
        self._prefix = f"{folder}/rank-{rank:05d}/{attempt:06d}-"
        self._what = what
        self._to_line = to_line
        self._is_ready = is_ready
        self._first_interval_s = first_interval_s
        self._copies = copies
        self._waiting: deque[Mapping[str, Any]] = deque()
        """Records that a device still computes, and those after them."""
        self._num_batches = 0
        self._growing = self._new_batch()
        self._next_key = part_key(self._prefix, 1)
        self._full: _Batch | None = None
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
        """Write what was appended before; raises StorageError, and keeps what isn't written."""
        with self._writing:
            self._wait_for_all()
            if self._full is not None:
                self._write_full()
            with self._taking:
                if not self._growing.lines:
                    return
                self._full, self._growing = self._growing, self._new_batch()
            self._write_full()

    def close(self) -> None:
        """Write all that is left; raises StorageError after a few tries."""
        if self._thread is None:
            return
        self._closing.set()
        self._thread.join()
        self._thread = None
        tries_left = NUM_LAST_TRIES
        while num_pending := self._num_pending():
            try:
                self.flush()
            except StorageError as error:
                tries_left -= 1
                if tries_left == 0:
                    what = f"{num_pending} {self._what} records"
                    msg = f"{what} could not be written to {self._next_key}: {error}"
                    raise StorageError(msg) from error
                threading.Event().wait(PAUSE_S)

    def _num_pending(self) -> int:
        num_full = 0 if self._full is None else len(self._full.lines)
        return len(self._waiting) + len(self._growing.lines) + num_full

    def _write_parts(self) -> None:
        is_failing, began_s, interval_s = False, time.monotonic(), self._first_interval_s
        while not self._closing.wait(interval_s):
            interval_s = next_interval_s(interval_s, time.monotonic() - began_s)
            try:
                self.flush()
                is_failing = False
            except Exception as error:  # noqa: BLE001 - the training continues; close() raises what lasts
                if not is_failing:
                    text = "%s records can't be written to %s, and are kept to try again: %s"
                    logger.warning(text, self._what, self._next_key, error)
                is_failing = True

    def _wait_for_all(self) -> None:
        # Not under the lock all the time, since the step must not wait for a device here.
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
        written = put_part(self._storage, self._next_key, b"".join(self._full.lines))
        self._full.drop()
        self._full = None
        number = int(written.removeprefix(self._prefix).removesuffix(SUFFIX))
        self._next_key = part_key(self._prefix, number + 1)

    def _new_batch(self) -> "_Batch":
        self._num_batches += 1
        name = part_key(self._prefix, self._num_batches)
        return _Batch(None if self._copies is None else self._copies / name)


class _Batch:
    """Lines that become one part, with a copy in a file that outlives a kill."""

    def __init__(self, copy: Path | None) -> None:
        self.lines: list[bytes] = []
        self._copy = copy
        self._file: int | None = None

    def add(self, line: bytes) -> None:
        self.lines.append(line)
        if self._copy is None:
            return
        try:
            if self._file is None:
                self._copy.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(self._copy, flags, 0o600)
            os.write(self._file, line)  # one call of the kernel, which no kill cuts in two
        except OSError as error:
            text = (
                "a kill of this rank would lose records since the last write: can't keep a copy: %s"
            )
            logger.warning(text, error)
            self._forget_copy()

    def drop(self) -> None:
        """Forget the lines: they are in the storage."""
        self.lines.clear()
        self._forget_copy()

    def _forget_copy(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._copy is not None:
            with suppress(OSError):  # never made
                self._copy.unlink()
            self._copy = None


def left_behind(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (key, content) of the batches that killed processes had not written, in order.

    The copies below the folder are named by their parts' keys; a last line that was cut is left
    out.
    """
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        content = path.read_bytes()
        if whole := content[: content.rfind(b"\n") + 1]:
            yield path.relative_to(folder).as_posix(), whole


def put_part(storage: Storage, key: str, content: bytes) -> str:
    """Write a part under its key or the next free one, and return that.

    The key is `<folder>/<attempt>-<part>.jsonl`. The content must be the same at every try:
    else what arrived though it seemed to fail would be there twice.
    """
    while not storage.write_if_absent(key, content):
        if storage.read(key) == content:
            break  # an earlier try arrived though it seemed to fail, or its writer was killed
        stem, _, number = key.removesuffix(SUFFIX).rpartition("-")
        key = part_key(f"{stem}-", int(number) + 1)
    return key


def part_key(prefix: str, number: int) -> str:
    """Return the key of a part, which sorts by its number."""
    return f"{prefix}{number:06d}{SUFFIX}"


def next_interval_s(interval_s: float, age_s: float) -> float:
    """Return how long to wait for the next part, after such an interval at such an age.

    1, 2, 4 ... 30 seconds, later a 64th of the log's age, at most five minutes: a short run
    shows its records soon, and a day leaves some 440 objects a rank, beside one for each
    checkpoint.
    """
    return min(2 * interval_s, max(LONG_INTERVAL_S, min(age_s * SHARE_OF_AGE, LONGEST_INTERVAL_S)))
