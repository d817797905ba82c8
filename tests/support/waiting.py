"""Waiting for a condition: the one way in which tests let time pass."""

import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

HANG_S = 120.0
"""Only what hangs takes so long, also on a loaded machine."""
POLL_S = 0.02


def becomes_true(condition: Callable[[], object], timeout_s: float = HANG_S) -> bool:
    """Wait for a condition; return whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def wait_until(
    condition: Callable[[], object], timeout_s: float = HANG_S, what: str = "the condition"
) -> None:
    """Wait for a condition; fail the test if it doesn't come true."""
    if not becomes_true(condition, timeout_s):
        sys.stderr.writelines(_stacks_of_descendants())  # pytest shows it with the failure
        msg = f"{what} did not come true within {timeout_s:g} s"
        raise AssertionError(msg)


@contextmanager
def told_if_it_hangs(timeout_s: float = HANG_S) -> Iterator[None]:
    """Show where all processes are if what is in the context takes so long; it isn't ended."""
    timer = threading.Timer(timeout_s, lambda: sys.stderr.writelines(_stacks_of_descendants()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _stacks_of_descendants() -> Iterator[str]:
    """Say where each process that this test has started is: nobody will see it hang again."""
    spy = shutil.which("py-spy", path=sysconfig.get_path("scripts"))
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError, subprocess.TimeoutExpired):
            yield f"\n{process.pid} of {process.ppid()}, {process.status()}: "
            yield f"{' '.join(process.cmdline())[:200]}\n"
            yield f"in the kernel: {Path(f'/proc/{process.pid}/wchan').read_text()}\n"
            if spy is not None:
                command = [spy, "dump", "--nonblocking", "--pid", str(process.pid)]
                yield subprocess.run(
                    command, capture_output=True, text=True, timeout=30, check=False
                ).stdout
