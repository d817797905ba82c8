"""Owns the lines that become one object: gathered in memory, with a copy in a file that
outlives a process that is killed.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from prefect_torch_ddp.storage.protocol import Storage

SUFFIX = ".jsonl"

logger = logging.getLogger(__name__)


class RecordBatch:
    """Grows by lines.

    What one process adds, another finds in the file, whatever becomes of the first: see
    `left_behind`.
    """

    def __init__(self, copy: Path | None) -> None:
        """Start without a line.

        Args:
            copy: the file, which must not exist; None: no copy is kept.
        """
        self._copy = copy
        self._file: int | None = None
        self._lines: list[bytes] = []

    @property
    def num_records(self) -> int:
        """How many lines it has."""
        return len(self._lines)

    def add(self, line: bytes) -> None:
        """Add a line with its end.

        To the file by one call of the kernel, which no kill cuts in two.
        """
        self._lines.append(line)
        if self._copy is None:
            return
        try:
            if self._file is None:
                self._copy.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(
                    self._copy,
                    os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC,
                    0o600,
                )
            os.write(self._file, line)
        except OSError as error:
            logger.warning(
                "records since the last write would be lost if this rank were killed: can't keep a copy: %s",
                error,
            )
            self._forget_copy()

    def content(self) -> bytes:
        """Return all lines."""
        return b"".join(self._lines)

    def drop(self) -> None:
        """Forget the lines: they are where they belong."""
        self._lines.clear()
        self._forget_copy()

    def _forget_copy(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._copy is not None:
            with contextlib.suppress(OSError):  # never made
                self._copy.unlink()
            self._copy = None


def left_behind(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (key, content) of the batches that ended processes had not written, in order; a
    last line that was cut is left out.

    Args:
        folder: below which the copies are, each named by the key of its object.
    """
    for path in sorted(folder.rglob(f"*{SUFFIX}")):
        content = path.read_bytes()
        if whole := content[: content.rfind(b"\n") + 1]:
            yield path.relative_to(folder).as_posix(), whole


def put_part(storage: Storage, key: str, content: bytes) -> str:
    """Write a part of a rank's records under its key, or under the next free one; return that.
    Doing it twice is no error.

    Args:
        storage: where to.
        key: `<folder>/<attempt>-<part>.jsonl`.
        content: the same at every try: else what arrived though it seemed to fail would be
            there twice.

    Raises:
        StorageError: it can't be written.
    """
    while not storage.write_if_absent(key, content):
        if storage.read(key) == content:
            break  # an earlier try arrived though it seemed to fail, or its writer was killed before it heard so
        stem, _, number = key.removesuffix(SUFFIX).rpartition("-")
        key = part_key(f"{stem}-", int(number) + 1)
    return key


def part_key(prefix: str, number: int) -> str:
    """Return the key of a part, which sorts by its number."""
    return f"{prefix}{number:06d}{SUFFIX}"
