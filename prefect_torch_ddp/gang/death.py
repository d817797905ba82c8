"""Owns what is said of a rank whose process ended before its function returned. Pure."""

import signal


def words_of_death(status: int, memory: str | None) -> str:
    """Say how it ended.

    Args:
        status: the exit code, or less than 0: the signal that killed it.
        memory: what is known of it as a victim of the kernel's OOM killer.
    """
    if status >= 0:
        return f"left with exit code {status} before its function returned"
    words = f"was killed by {signal.Signals(-status).name} ({-status}) before its function returned"
    return words if memory is None else f"{words}; {memory}"
