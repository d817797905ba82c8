"""The root cause of a gang's end, which of its failures are consequences, and the error. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from prefect_torch_ddp.errors import RankFailedError, WorkerLostError
from prefect_torch_ddp.protocol.events import RankFailure
from prefect_torch_ddp.protocol.rank import RankPlace

SETTLE_S = 0.25
"""How long to wait for a cause while all failures seen are consequences; enough in 240 of 240
trials."""
SILENT_SETTLE_S = 5.0
"""The same while a rank is silent: it may have closed its connections and be slow to end, or
its worker be lost."""
IDENTICAL_S = 0.025
"""How long to wait for identical failures, e.g. of a bad parameter: they tend to come within
milliseconds."""


def settle_s(failures: Sequence[RankFailure], num_returned: int, world_size: int) -> float:
    """Return how long after the first failure to wait for its cause: 0 once one has shown."""
    if any(not failure.is_collateral for failure in failures):
        return 0.0
    # A rank that returned and left its peers alone is cause enough.
    is_silent = num_returned == 0 and _num_failed(failures) < world_size
    return SILENT_SETTLE_S if is_silent else SETTLE_S


def identical_s(failures: Sequence[RankFailure], num_returned: int, world_size: int) -> float:
    """Return how long after the cause to wait for identical failures: 0 if none can come."""
    may_come = _num_failed(failures) + num_returned < world_size
    raised = any(failure.kind == "exception" and not failure.is_collateral for failure in failures)
    return IDENTICAL_S if raised and may_come else 0.0


def _num_failed(failures: Sequence[RankFailure]) -> int:
    return len({failure.rank for failure in failures})


def judge(
    failures: Sequence[RankFailure], returned: Sequence[RankPlace] = ()
) -> tuple[RankFailure, ...]:
    """Return the failures with the cause first: one that isn't collateral, else an early return.

    If there is neither, it is the first failure.
    """
    cause = next((failure for failure in failures if not failure.is_collateral), None)
    if cause is None and returned:
        return early_return(returned, failures[0].rank, failures), *failures
    cause = cause or failures[0]
    return cause, *(failure for failure in failures if failure is not cause)


def early_return(
    returned: Sequence[RankPlace], waiting: int, collateral: Sequence[RankFailure] = ()
) -> RankFailure:
    """Blame a rank whose function has ended for the one that waits for it in a collective."""
    first, *others = sorted(returned, key=lambda place: place.rank)
    also = f" (as had ranks {', '.join(str(place.rank) for place in others)})" if others else ""
    summary = (
        f"its function had already returned{also} "
        f"while rank {waiting} waited for it in a collective; take the same number of steps on "
        "every rank, and stop all of them together: ctx.request_stop(...)"
    )
    failure = RankFailure(first.rank, first.host, 0, "returned", summary)
    if not collateral:
        return failure
    waits = collateral[0]
    return replace(failure, traceback_text=waits.traceback_text, log_uri=waits.log_uri)


def error_for(failures: Sequence[RankFailure], attempt: int) -> RankFailedError | WorkerLostError:
    """Turn failures, the cause first, into the exception the caller gets."""
    cause, *collateral = failures
    if cause.kind != "worker_lost":
        return RankFailedError.from_failures(cause, attempt, collateral)
    lost = [failure for failure in failures if failure.kind == "worker_lost"]
    ranks = ", ".join(str(rank) for rank in sorted(failure.rank for failure in lost))
    return WorkerLostError(
        f"{cause.summary}; it held {'rank' if len(lost) == 1 else 'ranks'} {ranks} "
        f"in attempt {attempt}; the rest of the gang was stopped"
    )
