"""How a rank's records reach the storage: in parts, in the background, none lost by a kill."""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from prefect_torch_ddp.errors import StorageError
from prefect_torch_ddp.storage.formats import LINES
from prefect_torch_ddp.storage.protocol import Storage

SUFFIX = ".jsonl"
LONG_INTERVAL_S, LONGEST_INTERVAL_S = 30.0, 300.0
SHARE_OF_AGE = 1 / 64
FULL_BYTES = 2**23
"""A part that is as large is written at once."""
NUM_LAST_TRIES = 3
PAUSE_S = 0.2
UNKNOWN_SAMPLES = -1
"""`num_samples` of a record of a step whose samples nobody knows; 0: it is of no step."""

logger = logging.getLogger(__name__)


class RecordLog:
    """Appends records, or lines, to `runs/<run_id>/<kind>/rank-00000/<attempt>-<part>.jsonl`.

    While the storage fails, records are kept and tried again. Those that no part holds yet are
    in a file as well, where `left_behind` finds them after this process was killed.
    """

    def __init__(  # noqa: PLR0913 - what is written, by whom, and where to
        self,
        storage: Storage,
        run_id: str,
        kind: str,
        *,
        rank: int,
        attempt: int,
        first_interval_s: float = 1.0,
        copies: Path | None = None,
        suffix: str = SUFFIX,
    ) -> None:
        """Make it; the background thread starts with the first record.

        Args:
            storage: where to.
            run_id: of which run.
            kind: "metrics", "ledger", "timing", whose parts begin with a line that says their
                format; or a folder of logs.
            rank: who writes.
            attempt: in which attempt.
            first_interval_s: until the first part.
            copies: the folder for what isn't written yet; None: no copies are kept.
            suffix: of the parts' names.
        """
        self._storage = storage
        self._prefix = f"{records_folder(run_id, kind)}/rank-{rank:05d}/{attempt:06d}-"
        self._kind, self._suffix = kind, suffix
        self._first_interval_s = first_interval_s
        self._copies = copies
        self._head = orjson.dumps(LINES[kind].stamp({})) + b"\n" if suffix == SUFFIX else b""
        self._waiting: deque[Any] = deque()
        """Records that a device still computes, and those after them."""
        self._num_batches = 0
        self._growing = self._new_batch()
        self._next_key = part_key(self._prefix, 1, suffix)
        self._full: _Batch | None = None
        """What is being written; after an error the same again."""
        self._taking = threading.Lock()
        self._writing = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def append(self, record: Any) -> None:
        """Take a record, which must not change any more: a dict, a dataclass, or lines as bytes.

        The values of its "metrics" may be anything that `float()` takes. One that says by
        `is_ready()` that it isn't yet is waited for in the background.
        """
        with self._taking:
            self._waiting.append(record)
            while self._waiting and _is_ready(self._waiting[0]):
                self._growing.add(_line(self._waiting.popleft()))
        if len(self._growing.content) > FULL_BYTES and self._full is None:
            self._wake.set()
        if self._thread is None:
            name = f"prefect-torch-ddp-{self._kind}"
            self._thread = threading.Thread(target=self._write_parts, name=name, daemon=True)
            self._thread.start()

    @property
    def num_waiting_bytes(self) -> int:
        """Of what was appended and isn't written yet."""
        full = self._full
        return len(self._growing.content) + (0 if full is None else len(full.content))

    def write_soon(self) -> None:
        """Have what was appended written now, in the background."""
        self._wake.set()

    def flush(self) -> None:
        """Write what was appended before; raises StorageError, and keeps what isn't written."""
        with self._writing:
            self._wait_for_all()
            if self._full is not None:
                self._write_full()
            with self._taking:
                if not self._growing.content:
                    return
                self._full, self._growing = self._growing, self._new_batch()
            self._write_full()

    def close(self) -> None:
        """Write everything that is left; raises StorageError after a few tries."""
        if self._thread is None:
            return
        self._is_closing = True
        self._wake.set()
        self._thread.join()
        self._thread = None
        tries_left = NUM_LAST_TRIES
        while num_pending := self._num_pending():
            try:
                self.flush()
            except StorageError as error:
                tries_left -= 1
                if tries_left == 0:
                    what = f"{num_pending} records of {self._kind}"
                    msg = f"{what} could not be written to {self._next_key}: {error}"
                    raise StorageError(msg) from error
                threading.Event().wait(PAUSE_S)

    def _num_pending(self) -> int:
        num_full = 0 if self._full is None else self._full.num_records
        return len(self._waiting) + self._growing.num_records + num_full

    def _write_parts(self) -> None:
        is_failing, began_s, interval_s = False, time.monotonic(), self._first_interval_s
        while True:
            if not self._wake.wait(interval_s):
                interval_s = next_part_s(interval_s, time.monotonic() - began_s)
            self._wake.clear()
            if self._is_closing:
                return
            try:
                self.flush()
                is_failing = False
            except Exception as error:  # noqa: BLE001 - close() raises what lasts
                if not is_failing:
                    text = "records can't be written to %s; they are kept, to be written later: %s"
                    logger.warning(text, self._next_key, error)
                is_failing = True

    def _wait_for_all(self) -> None:
        # Not under the lock all the time, since the step must not wait for a device here.
        while True:
            with self._taking:
                if not self._waiting:
                    return
                first = self._waiting[0]
            _line(first)  # waits
            with self._taking:
                if self._waiting and self._waiting[0] is first:
                    self._growing.add(_line(self._waiting.popleft()))

    def _write_full(self) -> None:
        assert self._full is not None
        written = put_part(self._storage, self._next_key, bytes(self._full.content))
        self._full.drop()
        self._full = None
        number = int(written.removeprefix(self._prefix).removesuffix(self._suffix))
        self._next_key = part_key(self._prefix, number + 1, self._suffix)

    def _new_batch(self) -> "_Batch":
        self._num_batches += 1
        name = part_key(self._prefix, self._num_batches, self._suffix)
        return _Batch(self._head, None if self._copies is None else self._copies / name)


def records_folder(run_id: str, kind: str) -> str:
    """Return the key of the folder that has a kind of records of all ranks."""
    return f"runs/{run_id}/{kind}"


def _is_ready(record: Any) -> bool:
    if isinstance(record, dict):
        for value in record["metrics"].values():
            if type(value) is not float and not getattr(value, "is_ready", lambda: True)():
                return False
    return True


def _line(record: Any) -> bytes:
    if isinstance(record, bytes):
        return record
    line = orjson.dumps(record, default=float, option=orjson.OPT_APPEND_NEWLINE)
    # JSON has no number for nan and infinity; float() reads their text back.
    if b"null" in line and isinstance(record, dict):
        values = ((name, float(value)) for name, value in record["metrics"].items())
        metrics = {name: value if math.isfinite(value) else str(value) for name, value in values}
        line = orjson.dumps({**record, "metrics": metrics}, option=orjson.OPT_APPEND_NEWLINE)
    return line


class _Batch:
    """Lines that become one part, with a copy in a file that outlives a kill."""

    def __init__(self, head: bytes, copy: Path | None) -> None:
        self.content = bytearray()
        self._head = head
        self._copy = copy
        self._file: int | None = None

    @property
    def num_records(self) -> int:
        """Lines of it, but for its head."""
        return max(0, self.content.count(b"\n") - self._head.count(b"\n"))

    def add(self, line: bytes) -> None:
        if not self.content:
            line = self._head + line
        self.content += line
        if self._copy is None:
            return
        try:
            if self._file is None:
                self._copy.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
                self._file = os.open(self._copy, flags, 0o600)
            os.write(self._file, line)  # one call of the kernel, which no kill cuts in two
        except OSError as error:
            loss = "a kill of this rank would lose records since the last write"
            logger.warning("%s: can't keep a copy: %s", loss, error)
            self._forget_copy()

    def drop(self) -> None:
        """Forget the lines: they are in the storage."""
        self.content.clear()
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
    """Yield (key, content) of the batches that ended processes had not written, in order.

    The copies below the folder are named by their parts' keys; a last line that was cut is left
    out.
    """
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole.count(b"\n") > 1:  # more than its head
            yield path.relative_to(folder).as_posix(), whole


def put_part(storage: Storage, key: str, content: bytes) -> str:
    """Write a part under its key or the next free one, and return that.

    The key is `<folder>/<attempt>-<part>.<suffix>`. The content must be the same at every try:
    else what arrived though it seemed to fail would be there twice.
    """
    while not storage.write_if_absent(key, content):
        if storage.read(key) == content:
            break  # an earlier try arrived though it seemed to fail, or its writer was killed
        name, dot, suffix = key.rpartition(".")
        stem, _, number = name.rpartition("-")
        key = part_key(f"{stem}-", int(number) + 1, dot + suffix)
    return key


def part_key(prefix: str, number: int, suffix: str = SUFFIX) -> str:
    """Return the key of a part, which sorts by its number."""
    return f"{prefix}{number:06d}{suffix}"


def next_part_s(interval_s: float, age_s: float) -> float:
    """Return how long to wait for the next part, after such an interval at such an age.

    1, 2, 4 ... 30 seconds, later a 64th of the log's age, at most five minutes: a short run
    shows its records soon, and a day leaves some 440 objects a rank, in addition to one
    for each checkpoint.
    """
    longer_s = min(age_s * SHARE_OF_AGE, LONGEST_INTERVAL_S)
    return min(2 * interval_s, max(interval_s, LONG_INTERVAL_S, longer_s))
