"""The restarts of a gang within one call: its attempts, one after the other.

`policy` decides whether a failed one is followed by another. The attempt log numbers the attempts
and keeps how they failed.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefect_torch_ddp.errors import (
    CheckpointError,
    GangError,
    NotEnoughWorkersError,
    PrefectTorchDdpError,
    RankFailedError,
    StorageError,
)
from prefect_torch_ddp.gang.liveness import TimeBudget
from prefect_torch_ddp.gang.policy import (
    ATTEMPT_ERRORS,
    Action,
    AttemptFailure,
    decide,
    failure_record,
)
from prefect_torch_ddp.protocol.events import (
    NO_RANK,
    AttemptBegan,
    FailureRecord,
    GangEvent,
    LogLine,
    RecordsLeft,
)
from prefect_torch_ddp.records.rank_log import LogFolder

FULL_SIZE_S = 10.0
"""How long a restart waits for all ranks, when there are workers for the fewest."""


class AttemptLog(Protocol):
    """Numbers the attempts of one training and keeps their failures."""

    @property
    def knows_steps(self) -> bool:
        """Whether a failure without a step was one before the first step.

        Otherwise such a failure may have happened at any step.
        """

    @property
    def logs(self) -> LogFolder | None:
        """Where the ranks' lines are kept; None: nowhere."""

    def begin(self) -> int:
        """Return the number of the next attempt, from 1; older attempts are over from here on."""

    def last_failure(self) -> FailureRecord | None:
        """Return the failure of the newest attempt that has failed."""

    def keep_failure(self, failure: FailureRecord) -> None:
        """Keep a failure."""

    def keep_records(self, left: Sequence[RecordsLeft]) -> None:
        """Bring the records that ranks had not written to where they belong."""


@dataclass
class CallAttemptLog:
    """The attempt log of a single call of run_gang, which forgets all when the call is over."""

    next_attempt: int = 1
    logs: LogFolder | None = None
    last: FailureRecord | None = None
    knows_steps = False

    def begin(self) -> int:
        """Return the next number."""
        self.next_attempt += 1
        return self.next_attempt - 1

    def last_failure(self) -> FailureRecord | None:
        """Return what was recorded last."""
        return self.last

    def keep_failure(self, failure: FailureRecord) -> None:
        """Replace what was recorded last."""
        self.last = failure

    def keep_records(self, left: Sequence[RecordsLeft]) -> None:
        """Do nothing: a call by itself has no storage."""


class Restarts:
    """Runs a gang until an attempt succeeds, a failure is final, or no restart is left."""

    def __init__(
        self, attempt_log: AttemptLog, max_restarts: int, on_event: Callable[[GangEvent], None]
    ) -> None:
        """Start with all restarts left."""
        self._attempt_log = attempt_log
        self._max_restarts = max_restarts
        self._on_event = on_event
        self._world_size = 0
        self._first_size: int | None = None
        self._left: list[RecordsLeft] = []
        self._moved_at = 0
        self.num_made = 0
        """How many attempts of this call were followed by another."""
        self._follows: Action | None = None

    @property
    def num_left(self) -> int:
        """How many restarts may follow."""
        return self._max_restarts - self.num_made

    @property
    def has_grown(self) -> bool:
        """Whether the last attempt ended for the next to have more ranks: those that there are."""
        return self._follows is Action.GROW

    def full_size_s(self, workers_timeout_s: float) -> float:
        """Return how long the next attempt should wait for all its ranks if some could begin.

        After a restart that isn't long: a killed worker is back at once or not at all. A new job
        that takes over from one that left may queue.
        """
        match self._follows:
            case Action.GROW:
                return 0.0
            case Action.RESTART:
                return FULL_SIZE_S
            case _:
                return workers_timeout_s

    def size_to_ask_for(self, world_size: int | None) -> int | None:
        """Return how many ranks the next attempt should have; if open, as many as the first."""
        return world_size or self._first_size

    def run(self, attempt_once: Callable[[int], list[bytes]]) -> list[bytes]:
        """Return the values of the first attempt that succeeds.

        Raises:
            RankFailedError, WorkerLostError, GangHungError: the last attempt failed; a
                RankFailedError says so if it was not tried again because it would come back.
            NotEnoughWorkersError, and what the attempt log raises: no restart could be made;
                the cause is the failure before.
        """
        failed: PrefectTorchDdpError | None = None
        while True:
            try:
                attempt = self._attempt_log.begin()
                try:
                    return attempt_once(attempt)
                except ATTEMPT_ERRORS as error:
                    self._go_on_or_raise(error, attempt)
                    failed = error
                finally:
                    self._say(self._keep_records(self._take_records()))
            except (NotEnoughWorkersError, StorageError, CheckpointError) as error:
                if failed is not None and error.__cause__ is None:
                    raise error from failed
                raise

    def receive(self, event: GangEvent) -> None:
        """Take in an event and pass it on; records for the storage wait for the attempt's end."""
        if isinstance(event, RecordsLeft):
            self._left.append(event)
            return
        if isinstance(event, AttemptBegan):
            self._world_size = event.world_size
            self._first_size = self._first_size or event.world_size
        self._on_event(event)

    def _go_on_or_raise(self, error: GangError, attempt: int) -> None:
        """Return if the gang should run again; raise the error otherwise."""
        record = failure_record(error, attempt, self._world_size, self._moved_at)
        before = self._put_on_record(error, record)
        self._on_event(record)
        failure = AttemptFailure(error, record, self._attempt_log.knows_steps)
        decision = decide(failure, before, self.num_left)
        self._follows = decision.action
        match decision.action:
            case Action.GROW:
                self._say(f"{error.in_brief()}\nthe gang grows, which costs no restart")
            case Action.MOVE:
                self._moved_at = getattr(error, "saved_step", None) or self._moved_at
                self._say(
                    f"{error.in_brief()}\nthe gang moves to other workers, which costs no restart"
                )
            case Action.RESTART:
                self.num_made += 1
                again = f"restart {self.num_made} of {self._max_restarts}"
                self._say(f"{error.in_brief()}\nthe gang is started again: {again}")
            case Action.RAISE:
                if decision.is_final and isinstance(error, RankFailedError):
                    raise error.as_final(decision.why)
                raise error

    def _put_on_record(self, error: GangError, record: FailureRecord) -> FailureRecord | None:
        """Bring ranks' records and the failure to the storage; return the failure before it.

        Errors of the storage must not hide the failure, which is reported first.
        """
        left = self._take_records()
        budget = TimeBudget(lambda text: self._say(f"{error}\n{text}"))
        self._say(budget.spend_on(lambda: self._keep_records(left)) or "")
        found = budget.spend_on(lambda: self._remember(record))
        before, trouble = found or (None, "the storage was silent for too long")
        if trouble:
            what = f"the failure of attempt {record.attempt} could not be recorded"
            self._say(f"{what}: {trouble}")
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
            return f"records that ranks had not written are lost: {trouble}"
        return ""

    def _remember(self, record: FailureRecord) -> tuple[FailureRecord | None, str]:
        """Return the failure before this one, and what is wrong."""
        try:
            before = self._attempt_log.last_failure()
            self._attempt_log.keep_failure(record)
        except PrefectTorchDdpError as trouble:
            return None, str(trouble)
        return before, ""

    def _say(self, text: str) -> None:
        if text:
            self._on_event(LogLine(NO_RANK, logging.WARNING, text))
