"""Owns the restarts of a gang within one call: which failures are tried again, how often, and
what is said of it.

Owns how long a failure waits for a storage that is silent: it is told first, and then not kept
waiting for ever.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from prefect_torch_ddp.errors import (
    CheckpointError,
    GangHungError,
    NotEnoughWorkersError,
    PrefectTorchDdpError,
    RankFailedError,
    StorageError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.attempt_log import AttemptLog, record_of, why_hopeless
from prefect_torch_ddp.protocol.events import (
    NO_RANK,
    AttemptBegan,
    FailureRecord,
    GangEvent,
    LogLine,
    RecordsLeft,
)

Restartable = RankFailedError | WorkerLostError | GangHungError
RESTARTABLE = (RankFailedError, WorkerLostError, GangHungError)

FULL_SIZE_S = 10.0
"""How long a gang that restarts holds out for all its ranks, when there are workers for its
fewest."""

OnEvent = Callable[[GangEvent], None]


class Restarts:
    """Runs a gang until an attempt succeeds, fails for good, or no restart is left."""

    def __init__(self, attempt_log: AttemptLog, max_restarts: int, on_event: OnEvent) -> None:
        """Make it; nothing has begun.

        Args:
            attempt_log: numbers the attempts.
            max_restarts: how many more attempts follow the first one, at most.
            on_event: receives the gang's events, and is told of each restart.
        """
        self._attempt_log = attempt_log
        self._max_restarts = max_restarts
        self._on_event = on_event
        self._world_size = 0
        self._first_size: int | None = None
        self._left: list[RecordsLeft] = []
        self.num_made = 0
        """How many attempts of this call were followed by another."""

    @property
    def num_left(self) -> int:
        """How many restarts may follow."""
        return self._max_restarts - self.num_made

    def size_to_ask_for(self, world_size: int | None) -> int | None:
        """Return how many ranks the next attempt is to have: where that was left open, as many
        as the first one had.
        """
        return world_size or self._first_size

    def run(self, attempt_once: Callable[[int], list[bytes]]) -> list[bytes]:
        """Return the values of the first attempt that succeeds.

        Args:
            attempt_once: runs the attempt of the number given.

        Raises:
            RankFailedError, WorkerLostError, GangHungError: the last attempt failed; a
                RankFailedError says so where it was not tried again because it would come back.
            NotEnoughWorkersError, and what the attempt log raises: no restart could be made;
            the cause is the failure before.
        """
        failed: PrefectTorchDdpError | None = None
        while True:
            try:
                attempt = self._attempt_log.begin()
                try:
                    return attempt_once(attempt)
                except RESTARTABLE as error:
                    self._decide(error, attempt)
                    failed = error
                finally:
                    self._say(self._keep_records(self._take_records()))
            except (NotEnoughWorkersError, StorageError, CheckpointError) as error:
                if failed is not None and error.__cause__ is None:
                    raise error from failed
                raise

    def receive(self, event: GangEvent) -> None:
        """Take in an event and pass it on; what is the storage's goes there when the attempt is
        over.
        """
        if isinstance(event, RecordsLeft):
            self._left.append(event)
            return
        if isinstance(event, AttemptBegan):
            self._world_size = event.world_size
            self._first_size = self._first_size or event.world_size
        self._on_event(event)

    def _decide(self, error: Restartable, attempt: int) -> None:
        """Return when the gang is to be run again; raise the error otherwise."""
        record = record_of(error, attempt, self._world_size)
        before = self._put_on_record(error, record, self._take_records())
        why_not = why_hopeless(error, record, before, knows_steps=self._attempt_log.knows_steps)
        if why_not is not None and isinstance(error, RankFailedError):
            raise error.as_final(why_not)
        if self.num_left == 0:
            raise error
        self.num_made += 1
        self._say(
            f"{error}\nthe gang is started again: restart {self.num_made} of {self._max_restarts}"
        )

    def _put_on_record(
        self, error: Restartable, record: FailureRecord, left: list[RecordsLeft]
    ) -> FailureRecord | None:
        """Bring what the ranks left and the failure to the storage; return the failure before,
        None where that isn't known.
        """
        budget = TimeBudget(lambda text: self._say(f"{error}\n{text}"))
        self._say(budget.spend_on(lambda: self._keep_records(left)) or "")
        before, trouble = budget.spend_on(lambda: self._remember(record)) or (
            None,
            "the storage was silent for too long",
        )
        self._say(
            trouble
            and f"the failure of attempt {record.attempt} could not be put on record: {trouble}"
        )
        return before

    def _take_records(self) -> list[RecordsLeft]:
        left, self._left = self._left, []
        return left

    def _keep_records(self, left: list[RecordsLeft]) -> str:
        """Return what is wrong, or nothing."""
        try:
            if left:
                self._attempt_log.keep_records(left)
        except PrefectTorchDdpError as trouble:
            return f"records of killed ranks are lost: {trouble}"
        return ""

    def _remember(self, record: FailureRecord) -> tuple[FailureRecord | None, str]:
        """Put the failure on record; return the one before, and what is wrong: that must not
        hide the failure.
        """
        try:
            before = self._attempt_log.last_failure()
            self._attempt_log.record_failure(record)
        except PrefectTorchDdpError as trouble:
            return None, str(trouble)
        return before, ""

    def _say(self, text: str) -> None:
        if text:
            self._on_event(LogLine(NO_RANK, logging.WARNING, text))


QUIET_S = 3.0
"""How long a storage may take before people are told what it holds up."""
LIMIT_S = 30.0
"""How long it may take in all; what it hasn't taken by then is left."""

R = TypeVar("R")


class TimeBudget:
    """Spends a limited time on work with a storage, which its client alone may give up after
    many minutes.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Make it.

        Args:
            say: tells people that the storage is waited for.
        """
        self._say = say
        self._left_s = LIMIT_S
        self._has_said = False

    def spend_on(self, work: Callable[[], R]) -> R | None:
        """Return what the work returns, or None where it takes too long; it may go on in its
        thread. Raises what it raises.
        """
        if self._left_s <= 0:
            return None
        done: Future[R] = Future()
        # A daemon: it must not keep the process from ending.
        threading.Thread(
            target=_do, args=(work, done), name="prefect-torch-ddp-time budget", daemon=True
        ).start()
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
