"""Owns the decision which failure is the cause and which are its consequences. Pure.

Owns what the caller is told when its gang stopped at an agreed step, before its end. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prefect_torch_ddp.errors import GangCancelledError, GangError, RankFailedError, WorkerLostError
from prefect_torch_ddp.gang.caller.plan import GangPlan
from prefect_torch_ddp.protocol.events import RankFailure, RankStopped
from prefect_torch_ddp.protocol.rank import RankPlace

SETTLE_S = 0.25
"""How long to wait for a better suspect while all failures seen are consequences; right in 240
of 240 trials (design.md)."""
SILENT_SETTLE_S = 5.0
"""The same while a rank is silent: it may have closed its connections and be slow to end, or
its worker be lost."""

EQUALS_S = 0.025
"""How long to wait for other ranks that raise the same, e.g. for a bad parameter: they tend to
do so within milliseconds."""


@dataclass(frozen=True)
class RootCause:
    """The root cause and what followed from it."""

    cause: RankFailure
    collateral: tuple[RankFailure, ...]


def has_suspect(failures: Sequence[RankFailure]) -> bool:
    """Tell whether any failure seen is a cause rather than a consequence."""
    return any(not failure.is_collateral for failure in failures)


def settle_s(failures: Sequence[RankFailure], num_returned: int, world_size: int) -> float:
    """Return how long after the first failure the cause may be waited for: not at all once a
    suspect has shown.
    """
    if has_suspect(failures):
        return 0.0
    # A rank that returned and left its peers alone is cause enough.
    is_silent = num_returned == 0 and len({failure.rank for failure in failures}) < world_size
    return SILENT_SETTLE_S if is_silent else SETTLE_S


def equals_s(failures: Sequence[RankFailure], num_returned: int, world_size: int) -> float:
    """Return how long after the cause its equals may be waited for: not at all after a kill, or
    when no rank is left.
    """
    may_come = len({failure.rank for failure in failures}) + num_returned < world_size
    raised = any(failure.kind == "exception" and not failure.is_collateral for failure in failures)
    return EQUALS_S if raised and may_come else 0.0


def judge(failures: Sequence[RankFailure], returned: Sequence[RankPlace] = ()) -> RootCause:
    """Pick the cause: the first failure that isn't collateral, else a rank that left its peers
    alone, else the first failure.

    Args:
        failures: in the order they were seen; at least one.
        returned: places of the ranks whose function had returned.
    """
    cause = next((failure for failure in failures if not failure.is_collateral), None)
    if cause is None and returned:
        return RootCause(
            _returned_early(returned, failures[0].rank, failures[0].traceback_text), tuple(failures)
        )
    cause = cause or failures[0]
    return RootCause(cause, tuple(failure for failure in failures if failure is not cause))


def early_return(returned: Sequence[RankPlace], waiting: int) -> RootCause:
    """Blame a rank whose function is over for the one that waits for it in a collective.

    Args:
        returned: places of the ranks whose function is over.
        waiting: the rank that waits.
    """
    return RootCause(_returned_early(returned, waiting, ""), ())


def _returned_early(
    returned: Sequence[RankPlace], waiting: int, traceback_text: str
) -> RankFailure:
    first, *others = sorted(returned, key=lambda place: place.rank)
    also = f" (as had ranks {', '.join(str(place.rank) for place in others)})" if others else ""
    return RankFailure(
        rank=first.rank,
        host=first.host,
        pid=0,
        kind="returned",
        summary=f"its function had already returned{also} while rank {waiting} waited for it in a collective",
        traceback_text=traceback_text,
    )


def error_for(root_cause: RootCause, attempt: int) -> RankFailedError | WorkerLostError:
    """Turn the root cause into the exception the caller gets."""
    if root_cause.cause.kind == "worker_lost":
        ranks = sorted(
            f.rank for f in (root_cause.cause, *root_cause.collateral) if f.kind == "worker_lost"
        )
        named = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        return WorkerLostError(
            f"{root_cause.cause.summary}; it held {named} in attempt {attempt}; the rest of the gang was stopped"
        )
    return RankFailedError.from_failures(root_cause.cause, attempt, root_cause.collateral)


def cancelled(gang_name: str, why: str, stopped: Sequence[RankStopped]) -> GangCancelledError:
    """Return the error of a gang that was cancelled, with the step that its ranks agreed on and
    its checkpoint.

    Args:
        gang_name: for people.
        why: by what or from where, as the end of a sentence.
        stopped: what the ranks said of it.
    """
    step = stopped[0].stopped.step if stopped else None
    saved = next(
        (
            event.stopped.checkpoint_step
            for event in stopped
            if event.stopped.checkpoint_step is not None
        ),
        None,
    )
    return GangCancelledError(f"gang {gang_name!r} was cancelled {why}", step, saved)


def stopped_unasked(
    plan: GangPlan,
    stopped: Sequence[RankStopped],
    places: Sequence[RankPlace],
    why_agent_ended: str,
    *,
    was_cancelled: bool,
) -> GangError:
    """Return the error of a gang that the caller didn't stop: a rank got SIGTERM, a worker
    closed, or Dask cancelled an agent.

    Args:
        plan: which gang and attempt it was.
        stopped: what the ranks said of it.
        places: of all ranks, in rank order.
        why_agent_ended: what an agent said, empty where none ended by itself.
        was_cancelled: whether Dask cancelled an agent.
    """
    terminated = next((event for event in stopped if event.stopped.by == "SIGTERM"), None)
    if terminated is not None and not was_cancelled:
        step, host = terminated.stopped.step, places[terminated.rank].host
        summary = f"was told to end by SIGTERM (15); all ranks stopped after step {step}"
        failure = RankFailure(
            terminated.rank, host, pid=0, kind="signal", summary=summary, signal=15
        )
        return RankFailedError.from_failures(failure, plan.attempt)
    if why_agent_ended:
        after = f" after step {stopped[0].stopped.step}" if stopped else ""
        return WorkerLostError(f"{why_agent_ended}; the rest of the gang was stopped{after}")
    return cancelled(plan.name, "from outside; its ranks were stopped", stopped)
