"""A rank's lines in the storage: all of them, in few objects, written in the background."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from prefect_torch_ddp.records.log import part_key, put_part, records_folder
from prefect_torch_ddp.storage.protocol import Storage

FIRST_INTERVAL_S, LONGEST_INTERVAL_S = 60.0, 300.0
PART_BYTES = 2**22
"""A part that is as large is written at once."""
MAX_WAITING_BYTES = 2**26
"""Of lines that wait for a slow or failing storage; what comes then is lost."""
SUFFIX = ".txt"


@dataclass(frozen=True)
class LogFolder:
    """Where the lines of a gang's ranks are kept."""

    storage: Storage
    run_id: str
    kind: str = "logs"

    @property
    def key(self) -> str:
        """The folder's name in the storage."""
        return records_folder(self.run_id, self.kind)

    @property
    def uri(self) -> str:
        """The folder, for people."""
        return f"{self.storage.uri.rstrip('/')}/{self.key}"


class RankLogWriter:
    """Writes lines to `<folder>/rank-00003/<attempt>-<part>.txt`; never blocks.

    Parts are written after 1, 2, 4 and then every 5 minutes, when they are large, and at the end.
    """

    def __init__(self, folder: LogFolder, rank: int, attempt: int) -> None:
        """Make it; the background thread starts with the first line."""
        self._storage = folder.storage
        name = f"/rank-{rank:05d}/{attempt:06d}-"
        self._prefix, self.uri = folder.key + name, f"{folder.uri}{name}*{SUFFIX}"
        self._waiting = bytearray()
        self._num_lost = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._trouble = ""

    def add(self, lines: Sequence[str], origin: str = "") -> None:
        """Take lines, with the time and what they come from (`WARNING user.code: `) in front."""
        now = datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds")
        stamp = f"{now}Z {origin}"
        text = stamp + f"\n{stamp}".join(lines) + "\n"
        with self._lock:
            if len(self._waiting) > MAX_WAITING_BYTES:
                self._num_lost += len(lines)
                return
            self._waiting += text.encode(errors="replace")
        if len(self._waiting) > PART_BYTES:
            self._wake.set()
        if self._thread is None:
            name = "prefect-torch-ddp-rank-log"
            self._thread = threading.Thread(target=self._write_parts, name=name, daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Have what is left written now; `join` waits for it."""
        self._is_closing = True
        self._wake.set()

    def join(self, timeout_s: float) -> str:
        """Wait until all is written; return what is wrong, or nothing."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return f"{self._storage.uri} has not taken the last of it for {timeout_s:.0f} s"
        lost = f"the storage was too slow for {self._num_lost:,} lines" if self._num_lost else ""
        return self._trouble or lost

    def _write_parts(self) -> None:
        number, interval_s, content = 1, FIRST_INTERVAL_S, b""
        is_last = False
        while not is_last:
            if not (is_large := self._wake.wait(interval_s)):
                interval_s = min(2 * interval_s, LONGEST_INTERVAL_S)
            self._wake.clear()
            is_last = self._is_closing
            least = PART_BYTES if is_large and not is_last else 1
            try:
                while content := content or self._next_part(least):
                    key = put_part(self._storage, part_key(self._prefix, number, SUFFIX), content)
                    number = int(key.removeprefix(self._prefix).removesuffix(SUFFIX)) + 1
                    with self._lock:
                        del self._waiting[: len(content)]
                    content = b""  # until here every try writes the same
                self._trouble = ""
            except Exception as error:  # noqa: BLE001 - it is tried again, and the training continues
                self._trouble = str(error)
                time.sleep(0.0 if is_last else 1.0)  # a flood would have it tried again at once

    def _next_part(self, least: int) -> bytes:
        with self._lock:
            if len(self._waiting) < least:
                return b""
            end = self._waiting.rfind(b"\n", 0, 2 * PART_BYTES) + 1
            return bytes(self._waiting[:end])
