"""Owns how these tests find a job's processes and wait for what other processes bring about."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil


def processes_with(mark: str, resume_record: str, *, exact: bool) -> list[psutil.Process]:
    """Return the living processes whose inherited environment has the entry `mark` and one that
    is, or begins with, another."""
    found = []
    for process in psutil.process_iter():
        try:
            # A process that has ended, and waits for its parent to look, has none.
            entries = (
                Path(f"/proc/{process.pid}/environ")
                .read_bytes()
                .decode(errors="replace")
                .split("\0")
            )
        except (OSError, psutil.Error):
            continue
        if mark in entries and any(
            entry == resume_record if exact else entry.startswith(resume_record)
            for entry in entries
        ):
            found.append(process)
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition and tell whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return true
