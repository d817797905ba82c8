"""Whether a failed training is tried again, and how: the one place that decides it.

A gang's restarts ask about a failed attempt, Prefect's retry condition about a failed task, and
the flow about a task whose own worker was lost. Decisions are pure: what has to be known comes
with the failure.
"""

import re
from dataclasses import dataclass, replace
from enum import Enum

from prefect_torch_ddp.errors import (
    COMES_BACK,
    GangCancelledError,
    GangError,
    GangGrowsError,
    GangHungError,
    RankFailedError,
    SchedulerLostError,
    SupersededError,
    SupervisorLostError,
    VersionConflictError,
    WorkerLostError,
    is_superseded,
)
from prefect_torch_ddp.protocol.events import FailureRecord

ATTEMPT_ERRORS = (RankFailedError, WorkerLostError, GangHungError, GangGrowsError)
"""How an attempt can end that another may follow within the same call."""
TASK_LOSS_ERRORS = (SupervisorLostError, SchedulerLostError)
"""How a flow loses a task, which then can't be retried by Prefect."""
_FINAL = (*COMES_BACK, GangCancelledError, SchedulerLostError, VersionConflictError)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")


class Action(Enum):
    """What follows a failure."""

    RESTART = "restart"
    """It is tried again, which uses up one of the tries that are left."""
    MOVE = "move"
    """It continues on other workers from what was saved, which uses up none."""
    GROW = "grow"
    """It continues with more ranks, which uses up none."""
    RAISE = "raise"
    """The error is raised."""


@dataclass(frozen=True)
class Decision:
    """What follows a failure, and why."""

    action: Action
    why: str
    is_final: bool = False
    """Whether nobody above should try again either: it would end in the same way."""


@dataclass(frozen=True)
class AttemptFailure:
    """A gang's attempt has failed."""

    error: GangError
    record: FailureRecord
    """What is kept of it; see `failure_record`."""
    knows_steps: bool
    """Whether a failure without a step was one before the first step."""


@dataclass(frozen=True)
class TaskFailure:
    """A Prefect task has failed."""

    error: BaseException
    worker_leaves: bool = False
    """Whether its Dask worker is on its way out."""


@dataclass(frozen=True)
class TaskLoss:
    """A task was lost with the Dask worker that ran it, or with the way there."""

    error: SupervisorLostError | SchedulerLostError
    cluster_lives: bool
    """Whether the scheduler still answers, so that the task can be submitted again."""


Failure = AttemptFailure | TaskFailure | TaskLoss


def decide(failure: Failure, before: FailureRecord | None, left: int) -> Decision:
    """Decide what follows a failure.

    Args:
        failure: what has failed, and what is known of it.
        before: the failure of the attempt before, if there was one.
        left: how many more tries the one who asks has: restarts, retries or submissions.
    """
    if (decision := _continued(failure)) is not None:
        return decision
    match failure:
        case AttemptFailure():
            why_not = _why_hopeless(failure, before)
        case TaskFailure(error):
            why_not = _why_final(error)
        case TaskLoss(cluster_lives=lives):
            why_not = None if lives else "its cluster is lost too"
    if why_not is not None:
        return Decision(Action.RAISE, why_not, is_final=True)
    if left <= 0:
        return Decision(Action.RAISE, "all tries are used up")
    return Decision(Action.RESTART, "another attempt may succeed")


def failure_record(
    error: GangError, attempt: int, world_size: int, moved_at: int = 0
) -> FailureRecord:
    """Make the record of a failed attempt.

    Args:
        error: how it ended.
        attempt: its number.
        world_size: how many ranks it had.
        moved_at: the step at which the gang moved last. A further move needs a later one, so that
            moves that gain nothing come to an end.
    """
    saved_step = error.saved_step or 0 if isinstance(error, WorkerLostError) else 0
    record = FailureRecord(
        attempt,
        world_size,
        summary=str(error).splitlines()[0],
        fingerprint=None,
        step=None,
        is_move=isinstance(error, GangGrowsError) or saved_step > moved_at,
    )
    if not isinstance(error, RankFailedError):
        return record
    failure = error.failure
    record = replace(record, step=failure.step)
    if failure.is_collateral or failure.retryability == "transient":
        return record
    # An object without a __repr__ shows its address, which differs in each attempt.
    fingerprint = _ADDRESS.sub("0x...", f"{failure.exception_type}: {failure.summary}")
    return replace(record, fingerprint=fingerprint)


def _continued(failure: Failure) -> Decision | None:
    """Return what follows if nothing went wrong: the training continues on other workers."""
    match failure:
        case AttemptFailure(error=GangGrowsError() as error):
            return Decision(Action.GROW, str(error))
        case AttemptFailure(record=FailureRecord(is_move=True) as now):
            return Decision(Action.MOVE, now.summary)
        case TaskFailure(GangCancelledError() | SupersededError(), worker_leaves=True):
            why = "its worker leaves, so Dask or the flow runs the task again elsewhere"
            return Decision(Action.MOVE, why)
    return None


def _why_hopeless(failure: AttemptFailure, before: FailureRecord | None) -> str | None:
    """Say why another attempt would end in the same way; None if it might not."""
    error, now = failure.error, failure.record
    if not isinstance(error, RankFailedError):
        return None
    name = error.failure.exception_type.rpartition(".")[2]
    if error.failure.retryability == "hopeless":
        until = "until code, installation or parameters are changed"
        always = f"a failure by {name} comes back at every attempt {until}"
        return "the newer attempt counts" if is_superseded(error) else always
    if before is None or now.fingerprint is None:
        return None
    if (now.fingerprint, now.step) != (before.fingerprint, before.step):
        return None
    if now.step is None and not failure.knows_steps:
        return None
    where = "before the first step" if now.step is None else f"at step {now.step}"
    why = "it comes from the code or its input, not from chance"
    return f"the same {name} {where} ended attempt {before.attempt} too, so {why}"


def _why_final(error: BaseException) -> str | None:
    """Say why a retry would end in the same way, or nobody wants one; None if one may help."""
    if isinstance(error, RankFailedError) and error.why_final is not None:
        return error.why_final
    if isinstance(error, _FINAL):
        return f"a {type(error).__name__} comes back, or nobody wants another try"
    cause = getattr(error, "__cause__", None)  # a task may also end in a state without an error
    if isinstance(cause, COMES_BACK):
        return f"its cause, {type(cause).__name__}, comes back at every try"
    return None
