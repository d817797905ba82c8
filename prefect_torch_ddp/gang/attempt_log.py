"""The attempt log: it numbers a gang's attempts and keeps how they failed."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from prefect_torch_ddp.protocol.events import FailureRecord, RecordsLeft

QUIET_S = 3.0
"""How long a storage may take before a message says what it delays."""
LIMIT_S = 30.0
"""How long it may take in all; what isn't written by then is dropped."""

R = TypeVar("R")


class AttemptLog(Protocol):
    """Numbers the attempts of one training and keeps their failures."""

    @property
    def knows_steps(self) -> bool:
        """Whether a failure without a step was one before the first step.

        Otherwise such a failure may have happened at any step.
        """
        ...

    def begin(self) -> int:
        """Return the number of the next attempt, from 1; older attempts are over from here on."""
        ...

    def last_failure(self) -> FailureRecord | None:
        """Return the failure of the newest attempt that has failed."""
        ...

    def record_failure(self, record: FailureRecord) -> None:
        """Keep a failure."""
        ...

    def keep_records(self, left: Sequence[RecordsLeft]) -> None:
        """Bring the records that killed ranks had not written to where they belong."""
        ...


class CallAttemptLog:
    """The attempt log of a single call of run_gang, which forgets all when the call is over."""

    knows_steps = False

    def __init__(self, first_attempt: int) -> None:
        """Begin at that attempt."""
        self._next = first_attempt
        self._last: FailureRecord | None = None

    def begin(self) -> int:
        """Return the next number."""
        self._next += 1
        return self._next - 1

    def last_failure(self) -> FailureRecord | None:
        """Return what was recorded last."""
        return self._last

    def record_failure(self, record: FailureRecord) -> None:
        """Replace what was recorded last."""
        self._last = record

    def keep_records(self, left: Sequence[RecordsLeft]) -> None:
        """Do nothing: a call alone has no storage."""


class TimeBudget:
    """Limits the time of work with a storage, whose client may take minutes to give up."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Start with the whole budget.

        Args:
            say: logs that the gang waits for the storage.
        """
        self._say = say
        self._left_s = LIMIT_S
        self._has_said = False

    def spend_on(self, work: Callable[[], R]) -> R | None:
        """Return what the work returns or raise what it raises; None where it takes too long.

        Work that takes too long may still finish in its thread.
        """
        if self._left_s <= 0:
            return None
        done: Future[R] = Future()
        # A daemon: it must not keep the process from ending.
        name = "prefect-torch-ddp-time budget"
        threading.Thread(target=_do, args=(work, done), name=name, daemon=True).start()
        while self._left_s > 0:
            turn_s = min(QUIET_S, self._left_s)
            try:
                return done.result(turn_s)
            except TimeoutError:
                if done.done():
                    raise  # the work's own
                self._left_s -= turn_s
                self._say_once()
        return None

    def _say_once(self) -> None:
        if not self._has_said:
            self._has_said = True
            self._say(
                f"the storage has not answered for {QUIET_S:g} s: "
                f"it gets {LIMIT_S:g} s to take what is left to put on record"
            )


def _do(work: Callable[[], R], done: Future[R]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whoever waits shall have it
        done.set_exception(error)
