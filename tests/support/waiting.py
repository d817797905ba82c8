"""Waiting for a condition: the one way in which tests let time pass."""

import time
from collections.abc import Callable

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
    """Wait for a condition; fail the test where it doesn't come true."""
    assert becomes_true(condition, timeout_s), f"{what} did not come true within {timeout_s:g} s"
