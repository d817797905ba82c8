"""Owns how long a failure waits for a storage that is silent: it is told first, and then not kept waiting for ever."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

QUIET_S = 3.0
"""How long a storage may take before people are told what it holds up."""
LIMIT_S = 30.0
"""How long it may take in all; what it hasn't taken by then is left."""

R = TypeVar("R")


class Patience:
    """Spends a limited time on work with a storage, which its client alone may give up after many minutes."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Make it.

        Args:
            say: tells people that the storage is waited for.
        """
        self._say = say
        self._left_s = LIMIT_S
        self._has_said = False

    def spend_on(self, work: Callable[[], R]) -> R | None:
        """Return what the work returns, or None where it takes too long; it may go on in its thread. Raises what it raises."""
        if self._left_s <= 0:
            return None
        done: Future[R] = Future()
        # A daemon: it must not keep the process from ending.
        threading.Thread(target=_do, args=(work, done), name="prefect-torch-ddp-patience", daemon=True).start()
        while self._left_s > 0:
            turn_s = min(QUIET_S, self._left_s)
            try:
                return done.result(turn_s)
            except TimeoutError:
                if done.done():
                    raise  # the work's own
                self._left_s -= turn_s
                self._tell()
        return None

    def _tell(self) -> None:
        if not self._has_said:
            self._has_said = True
            self._say(
                f"the storage has not answered for {QUIET_S:g} s: it gets {LIMIT_S:g} s to take what is left to put on record"
            )


def _do(work: Callable[[], R], done: Future[R]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whoever waits shall have it
        done.set_exception(error)
