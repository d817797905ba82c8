"""Owns the numbering of a gang's attempts, and the memory of how they failed that tells a
chance failure from one that stays.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from prefect_torch_ddp.errors import GangError, RankFailedError
from prefect_torch_ddp.protocol.events import FailureRecord, RecordsLeft

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


class AttemptLog(Protocol):
    """Numbers the attempts of one training and remembers their failures, across calls of
    run_gang where it is kept.
    """

    @property
    def knows_steps(self) -> bool:
        """Whether a failure without a step was one before the first step; else it says nothing
        about when it was.
        """
        ...

    def begin(self) -> int:
        """Return the number of the next attempt, from 1; older attempts are over from here
        on.
        """
        ...

    def last_failure(self) -> FailureRecord | None:
        """Return the failure of the newest attempt that has failed."""
        ...

    def record_failure(self, record: FailureRecord) -> None:
        """Remember a failure."""
        ...

    def keep_records(self, left: Sequence[RecordsLeft]) -> None:
        """Bring the records that killed ranks had not written to where they belong."""
        ...


class CallAttemptLog:
    """The attempt log of a single call: it counts from a number given, and forgets all when the
    call is over.
    """

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


def record_of(error: GangError, attempt: int, world_size: int) -> FailureRecord:
    """Make the record of a failed attempt."""
    summary = str(error).splitlines()[0]
    record = FailureRecord(attempt, world_size, summary, fingerprint=None, step=None)
    if not isinstance(error, RankFailedError):
        return record
    failure = error.failure
    record = replace(record, step=failure.step)
    if failure.kind != "exception" or failure.is_collateral or failure.retryability == "transient":
        return record
    # An object without a __repr__ shows its address, which is another one in each attempt.
    return replace(
        record, fingerprint=_ADDRESS.sub("0x...", f"{failure.exception_type}: {failure.summary}")
    )


def why_hopeless(
    error: GangError, now: FailureRecord, before: FailureRecord | None, *, knows_steps: bool
) -> str | None:
    """Say why another attempt would end in the same way; None where it may go better.

    Args:
        error: how the attempt failed.
        now: its record.
        before: the record of the attempt that failed before it, if one did.
        knows_steps: whether a failure without a step was one before the first step.
    """
    if not isinstance(error, RankFailedError):
        return None
    name = error.failure.exception_type.rpartition(".")[2]
    if error.failure.retryability == "hopeless":
        return f"a failure by {name} comes back at every attempt until code, installation or parameters are changed"
    if (
        before is None
        or now.fingerprint is None
        or now.fingerprint != before.fingerprint
        or now.step != before.step
    ):
        return None
    if now.step is None and not knows_steps:
        return None
    where = "before the first step" if now.step is None else f"at step {now.step}"
    return f"the same {name} {where} ended attempt {before.attempt} too, so it comes from the code or its input, not from chance"
