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
"""Of lines that wait for a slow or failing storage; what comes then is left out."""
SUFFIX = ".txt"


@dataclass(frozen=True)
class LogFolder:
    """Where the lines of a gang's ranks are kept."""

    storage: Storage
    run_id: str
    stage: str = ""
    """What the gang does; empty for the training itself."""

    @property
    def key(self) -> str:
        """The folder's name in the storage."""
        return "/".join(filter(None, (records_folder(self.run_id, "logs"), self.stage)))

    @property
    def uri(self) -> str:
        """The folder, for people."""
        return f"{self.storage.uri.rstrip('/')}/{self.key}"


class RankLogWriter:
    """Writes lines to `runs/<run_id>/logs/rank-00003/<attempt>-<part>.txt`; never blocks.

    Parts are written after 1, 2, 4 and then every 5 minutes, when they are large, and at the end.
    """

    def __init__(self, folder: LogFolder, rank: int, attempt: int) -> None:
        """Make it; the background thread starts with the first line."""
        self._storage = folder.storage
        name = f"/rank-{rank:05d}/{attempt:06d}-"
        self._prefix = folder.key + name
        self.uri = f"{folder.uri}{name}*{SUFFIX}"
        """Names all parts, for people."""
        self._waiting = bytearray()
        self._num_dropped = 0
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
                self._num_dropped += len(lines)
            else:
                if self._num_dropped:
                    gap = f"{now}Z --- {self._num_dropped:,} lines lost: the storage was too slow\n"
                    self._waiting += gap.encode()
                    self._num_dropped = 0
                self._waiting += text.encode(errors="replace")
            is_large = len(self._waiting) > PART_BYTES
        if is_large:
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
        if self._thread is None:
            return ""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return f"{self._storage.uri} has not taken the last of it for {timeout_s:.0f} s"
        return self._trouble

    def _write_parts(self) -> None:
        number, interval_s, content = 1, FIRST_INTERVAL_S, b""
        while True:
            if not (is_large := self._wake.wait(interval_s)):
                interval_s = min(2 * interval_s, LONGEST_INTERVAL_S)
            self._wake.clear()
            is_last = self._is_closing
            least = PART_BYTES if is_large and not is_last else 1
            try:
                while content := content or self._next_part(least):
                    key = part_key(self._prefix, number, SUFFIX)
                    written = put_part(self._storage, key, content)
                    number = int(written.removeprefix(self._prefix).removesuffix(SUFFIX)) + 1
                    with self._lock:
                        del self._waiting[: len(content)]
                    content = b""  # until here every try writes the same
                self._trouble = ""
            except Exception as error:  # noqa: BLE001 - it is tried again, and the training continues
                self._trouble = str(error)
                if not is_last:
                    time.sleep(1.0)  # a flood would have it tried again at once
            if is_last:
                return

    def _next_part(self, least: int) -> bytes:
        with self._lock:
            if len(self._waiting) < least:
                return b""
            end = self._waiting.rfind(b"\n", 0, 2 * PART_BYTES) + 1
            return bytes(self._waiting[:end])
