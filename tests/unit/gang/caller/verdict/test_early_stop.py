"""Why a gang stopped early, and whether its checkpoint is still to come, are pure decisions."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from prefect_torch_ddp.errors import (
    GangCancelledError,
    GangError,
    GangGrowsError,
    RankFailedError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.caller.verdict.early_stop import EarlyStop
from prefect_torch_ddp.gang.caller.verdict.root_cause import SILENT_SETTLE_S
from prefect_torch_ddp.protocol.events import RankFailure, RankStopped, Stopped
from prefect_torch_ddp.protocol.rank import RankPlace

GRACE_S = 20.0
PLAN: Any = SimpleNamespace(name="train", attempt=2)
PLACES = [RankPlace(rank, 0, rank, f"tcp://{rank}:1", f"host-{rank}") for rank in (0, 1)]
RAISED = RankFailure(
    1, "host-1", 2, "exception", "too little", exception_type="builtins.ValueError"
)
CLOSED = replace(RAISED, rank=0, summary="Connection closed by peer", is_collateral=True)
KILLED = replace(RAISED, kind="signal", signal=9)
LOST = RankFailure(1, "host-1", 0, "worker_lost", "worker tcp://b:1 was lost")
NOT_SAVED = replace(RAISED, exception_type="prefect_torch_ddp.StorageError")
STOPPED = [RankStopped(rank, Stopped(7, "order")) for rank in (0, 1)]
SAVED = RankStopped(0, Stopped(7, "order", 7, is_saved=True))
LEAVES = "worker tcp://b:1 was closed"


def test_code_after_a_loop_that_was_stopped_is_no_cause() -> None:
    """A lost rank or an unwritten checkpoint is one, as is a rank that had not stopped."""
    assert EarlyStop(STOPPED).is_cause
    assert EarlyStop(STOPPED, [CLOSED, RAISED]).is_cause
    for cause in (KILLED, LOST, NOT_SAVED, replace(RAISED, rank=2)):
        assert not EarlyStop(STOPPED, [RAISED, cause]).is_cause
    assert not EarlyStop([], [RAISED]).is_cause
    assert not EarlyStop(STOPPED, broken=GangError("lost")).is_cause


@pytest.mark.parametrize(
    ("stop", "expected_s"),
    [
        pytest.param(EarlyStop((), [RAISED], why_grows="more"), 0.0, id="no-stop"),
        pytest.param(EarlyStop(STOPPED, [KILLED], why_grows="more"), 0.0, id="another-cause"),
        pytest.param(EarlyStop(STOPPED, [RAISED]), SILENT_SETTLE_S, id="unexplained"),
        pytest.param(EarlyStop(STOPPED, [RAISED], why_grows="more"), GRACE_S, id="unsaved-grows"),
        pytest.param(EarlyStop(STOPPED, [RAISED], why_asked="Ctrl-C"), GRACE_S, id="unsaved-asked"),
        pytest.param(EarlyStop(STOPPED, [RAISED], why_agent_ended=LEAVES), GRACE_S, id="leaves"),
        pytest.param(EarlyStop(STOPPED, [RAISED], has_cancelled_agent=True), GRACE_S, id="cancel"),
        pytest.param(EarlyStop(STOPPED, [RAISED], {0}, why_grows="more"), 0.0, id="0-returned"),
        pytest.param(EarlyStop(STOPPED, [RAISED, CLOSED], why_grows="more"), 0.0, id="0-failed"),
        pytest.param(EarlyStop([*STOPPED, SAVED], [RAISED], why_grows="more"), 0.0, id="saved"),
    ],
)
def test_a_stop_is_waited_for_until_rank_0_has_saved(stop: EarlyStop, expected_s: float) -> None:
    """And for its explanation before, but not where there is another cause."""
    assert stop.settle_s(GRACE_S) == expected_s


@pytest.mark.parametrize(
    ("stop", "kind", "text"),
    [
        pytest.param(EarlyStop(STOPPED, [KILLED]), None, "", id="another-cause"),
        pytest.param(EarlyStop(STOPPED, [RAISED]), None, "", id="unexplained"),
        pytest.param(
            EarlyStop(STOPPED, [KILLED], why_asked="Ctrl-C"),
            GangCancelledError,
            "stopped by Ctrl-C",
            id="asked",
        ),
        pytest.param(
            EarlyStop(STOPPED, why_grows="more", has_cancelled_agent=True),
            GangCancelledError,
            "cancelled from outside",
            id="cancelled-while-it-grows",
        ),
        pytest.param(
            EarlyStop(STOPPED, [RAISED], has_cancelled_agent=True),
            GangCancelledError,
            "cancelled from outside",
            id="cancelled-and-raised",
        ),
        pytest.param(
            EarlyStop(broken=GangCancelledError("cancelled")),
            GangCancelledError,
            "cancelled from outside",
            id="cancelled-before-a-step",
        ),
        pytest.param(
            EarlyStop(STOPPED, [RAISED], why_grows="more"),
            GangGrowsError,
            "more; all ranks stopped after step 7",
            id="grows",
        ),
        pytest.param(
            EarlyStop(STOPPED, [RAISED], why_grows="more", why_agent_ended=LEAVES),
            WorkerLostError,
            f"{LEAVES}; the rest of the gang was stopped after step 7",
            id="leaves-while-it-grows",
        ),
        pytest.param(
            EarlyStop((), [CLOSED], why_agent_ended=LEAVES),
            WorkerLostError,
            f"{LEAVES}; the rest of the gang was stopped",
            id="leaves-before-a-step",
        ),
        pytest.param(
            EarlyStop((), [RAISED, CLOSED], why_agent_ended=LEAVES), None, "", id="raised-before"
        ),
        pytest.param(
            EarlyStop([RankStopped(1, Stopped(7, "SIGTERM"))], [RAISED]),
            RankFailedError,
            "rank 1 on host-1 failed in attempt 2: was ended by SIGTERM",
            id="terminated",
        ),
        pytest.param(EarlyStop(STOPPED), GangCancelledError, "from outside", id="no-failure"),
    ],
)
def test_the_error_names_why_the_ranks_had_to_stop(
    stop: EarlyStop, kind: type[GangError] | None, text: str
) -> None:
    """Whatever code after the loop raised, and whatever else happened meanwhile."""
    error = stop.error(PLAN, PLACES)
    assert type(error) is (kind or type(None))
    assert text in str(error or "")


def test_a_worker_that_leaves_after_a_checkpoint_costs_nothing() -> None:
    """The error says which step is saved, if it is the stop's own."""
    saved = EarlyStop([*STOPPED, SAVED], [RAISED], why_agent_ended=LEAVES).error(PLAN, PLACES)
    assert isinstance(saved, WorkerLostError)
    assert saved.saved_step == 7
    late = EarlyStop([*STOPPED, SAVED], why_agent_ended=LEAVES, broken=WorkerLostError(LEAVES))
    error = late.error(
        PLAN, PLACES
    )  # its ranks saved, and were killed as they took too long to end
    assert isinstance(error, WorkerLostError)
    assert error.saved_step == 7
    assert replace(late, failures=[KILLED]).error(PLAN, PLACES) is None
    other = RankStopped(0, Stopped(7, "order", 5))
    for stopped in (STOPPED, [*STOPPED, other]):
        error = EarlyStop(stopped, why_agent_ended=LEAVES).error(PLAN, PLACES)
        assert isinstance(error, WorkerLostError)
        assert error.saved_step is None
