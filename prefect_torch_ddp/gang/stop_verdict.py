"""Owns what the caller is told when its gang stopped at an agreed step, before its end. Pure."""

from collections.abc import Sequence

from prefect_torch_ddp.errors import GangCancelledError, GangError, RankFailedError, WorkerLostError
from prefect_torch_ddp.gang.plan import GangPlan
from prefect_torch_ddp.messages import RankFailure, RankPlace, RankStopped


def cancelled(gang_name: str, why: str, stopped: Sequence[RankStopped]) -> GangCancelledError:
    """Return the error of a gang that was cancelled, with the step that its ranks agreed on and its checkpoint.

    Args:
        gang_name: for people.
        why: by what or from where, as the end of a sentence.
        stopped: what the ranks said of it.
    """
    step = stopped[0].stopped.step if stopped else None
    saved = next((event.stopped.checkpoint_step for event in stopped if event.stopped.checkpoint_step is not None), None)
    return GangCancelledError(f"gang {gang_name!r} was cancelled {why}", step, saved)


def stopped_unasked(
    plan: GangPlan,
    stopped: Sequence[RankStopped],
    places: Sequence[RankPlace],
    why_seat_ended: str,
    *,
    was_cancelled: bool,
) -> GangError:
    """Return the error of a gang that the caller didn't stop: a rank got SIGTERM, a worker closed, or Dask cancelled a seat.

    Args:
        plan: which gang and attempt it was.
        stopped: what the ranks said of it.
        places: of all ranks, in rank order.
        why_seat_ended: what a seat said, empty where none ended by itself.
        was_cancelled: whether Dask cancelled a seat.
    """
    terminated = next((event for event in stopped if event.stopped.by == "SIGTERM"), None)
    if terminated is not None and not was_cancelled:
        step, host = terminated.stopped.step, places[terminated.rank].host
        summary = f"was told to end by SIGTERM (15); all ranks stopped after step {step}"
        failure = RankFailure(terminated.rank, host, pid=0, kind="signal", summary=summary, signal=15)
        return RankFailedError.from_failures(failure, plan.attempt)
    if why_seat_ended:
        after = f" after step {stopped[0].stopped.step}" if stopped else ""
        return WorkerLostError(f"{why_seat_ended}; the rest of the gang was stopped{after}")
    return cancelled(plan.name, "from outside; its ranks were stopped", stopped)
