"""A rank's lines in the storage: all of them, in few objects, written in the background."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from prefect_torch_ddp.records.log import RecordLog, records_folder
from prefect_torch_ddp.storage.protocol import Storage

FIRST_INTERVAL_S = 60.0
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

    The first part comes after a minute, or when it is large; the last one at the end.
    """

    def __init__(self, folder: LogFolder, rank: int, attempt: int) -> None:
        """Make it; nothing is written before the first line."""
        self._log = RecordLog(
            folder.storage,
            folder.run_id,
            folder.kind,
            rank=rank,
            attempt=attempt,
            first_interval_s=FIRST_INTERVAL_S,
            suffix=SUFFIX,
        )
        self.uri = f"{folder.uri}/rank-{rank:05d}/{attempt:06d}-*{SUFFIX}"
        self._where = folder.storage.uri
        self._num_lost = 0
        self._closing = threading.Thread(target=self._close, daemon=True)
        self._trouble = ""

    def add(self, lines: Sequence[str], origin: str = "") -> None:
        """Take lines, with the time and what they come from (`WARNING user.code: `) in front."""
        if self._log.num_waiting_bytes > MAX_WAITING_BYTES:
            self._num_lost += len(lines)
            return
        now = datetime.now(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds")
        stamp = f"{now}Z {origin}"
        text = stamp + f"\n{stamp}".join(lines) + "\n"
        self._log.append(text.encode(errors="replace"))

    def end(self) -> None:
        """Have what is left written now; `join` waits for it."""
        if self._closing.ident is None:
            self._closing.start()

    def join(self, timeout_s: float) -> str:
        """Wait until all is written; return what is wrong, or nothing."""
        self.end()
        self._closing.join(timeout_s)
        if self._closing.is_alive():
            return f"{self._where} has not taken the last lines for {timeout_s:.0f} s"
        lost = f"the storage was too slow for {self._num_lost:,} lines" if self._num_lost else ""
        return self._trouble or lost

    def _close(self) -> None:
        try:
            self._log.close()
        except Exception as error:  # noqa: BLE001 - whoever joins says it
            self._trouble = str(error)
