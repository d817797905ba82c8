"""Owns the seat's side of a rank's pulse: the page in shared memory, read without asking the rank."""

import os
import tempfile
from typing import IO

from prefect_torch_ddp.pulse import PAGE_BYTES, Pulse


def pulse_file() -> IO[bytes]:
    """Make the page, in memory where the system can: on a disk that is busy its writer would wait."""
    file: IO[bytes]
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("prefect-torch-ddp-pulse", os.MFD_CLOEXEC), "r+b", 0)
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - returned, for its owner to close
    file.truncate(PAGE_BYTES)
    return file


def read_pulse(file: IO[bytes]) -> Pulse:
    """Return what the rank marked last. Read, not mapped: a rank that cut its file short could not hurt the worker."""
    return Pulse.from_page(os.pread(file.fileno(), PAGE_BYTES, 0).ljust(PAGE_BYTES, b"\0"))
