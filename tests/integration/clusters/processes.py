"""Finding the processes of a batch system's job."""

from pathlib import Path

import psutil


def processes_with(mark: str, job: str, *, exact: bool) -> list[psutil.Process]:
    """Return the living processes whose environment has both entries.

    The second may also be the begin of an entry, unless it is to be exact.
    """
    found = []
    for process in psutil.process_iter():
        try:
            # A process that has ended, and waits for its parent to look, has none.
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except (OSError, psutil.Error):
            continue
        entries = environment.decode(errors="replace").split("\0")
        if mark in entries and any(
            entry == job if exact else entry.startswith(job) for entry in entries
        ):
            found.append(process)
    return found
