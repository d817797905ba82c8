"""Owns the seat's side of a rank's pulse: the page in shared memory, and the stacks behind it, read without asking the rank."""

import os
import tempfile
from typing import IO

from prefect_torch_ddp.pulse import PAGE_BYTES, Pulse

MAX_STACKS_BYTES = 65_536
"""Of stacks that are longer the end is kept, where the main thread is."""


class PulsePage:
    """The file that a rank maps. Read, not mapped: a rank that cut its file short could not hurt the worker."""

    def __init__(self) -> None:
        """Make it, in memory where the system can: on a disk that is busy its writer would wait."""
        self._file: IO[bytes]
        if hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("prefect-torch-ddp-pulse", os.MFD_CLOEXEC), "r+b", 0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by our own close
        self._file.truncate(PAGE_BYTES)

    def fileno(self) -> int:
        """Return the file descriptor that the rank inherits."""
        return self._file.fileno()

    def read(self) -> Pulse:
        """Return what the rank marked last."""
        return Pulse.from_page(os.pread(self.fileno(), PAGE_BYTES, 0).ljust(PAGE_BYTES, b"\0"))

    def stacks_end(self) -> int:
        """Return where the stacks written so far end."""
        return os.fstat(self.fileno()).st_size

    def stacks(self, begin: int) -> str:
        """Return the stacks written from there on."""
        end = self.stacks_end()
        begin = max(begin, end - MAX_STACKS_BYTES)
        return os.pread(self.fileno(), end - begin, begin).decode(errors="replace")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
