"""Whether a failure is followed by another try is a pure decision; here as tables."""

from dataclasses import replace
from typing import Any

import pytest

from prefect_torch_ddp.errors import (
    CheckpointError,
    GangCancelledError,
    GangError,
    GangGrowsError,
    GangHungError,
    InvalidParamsError,
    NewerFormatError,
    NotEnoughWorkersError,
    RankFailedError,
    SchedulerLostError,
    StorageError,
    SupersededError,
    SupervisorLostError,
    VersionConflictError,
    WorkerLostError,
)
from prefect_torch_ddp.gang.policy import (
    Action,
    AttemptFailure,
    Decision,
    TaskFailure,
    TaskLoss,
    decide,
    failure_record,
)
from prefect_torch_ddp.protocol.events import Hang, RankFailure
from tests.support.failures import BOOM

KILLED = replace(BOOM, kind="signal", signal=9, retryability="transient")
EARLY = replace(BOOM, step=None)
IMPORTS = replace(BOOM, retryability="hopeless", exception_type="builtins.ImportError")
COLLATERAL = replace(BOOM, is_collateral=True)
HUNG = GangHungError(Hang("rank 1 did not arrive", (1,), ("a",), 5), attempt=2)
LOST = WorkerLostError("worker x was lost")


def failed(error: GangError, *, knows_steps: bool = True, moved_at: int = 0) -> AttemptFailure:
    """Make the failure of a second attempt."""
    return AttemptFailure(error, failure_record(error, 2, 4, moved_at), knows_steps)


def after(
    now: RankFailure, before: RankFailure | None, left: int = 1, *, knows_steps: bool = True
) -> Decision:
    """Decide after two attempts that ended by a rank's failure."""
    earlier = None if before is None else failure_record(RankFailedError(before, 1), 1, 4)
    return decide(failed(RankFailedError(now, 2), knows_steps=knows_steps), earlier, left)


@pytest.mark.parametrize(
    ("now", "before", "why"),
    [
        pytest.param(
            BOOM, BOOM, "the same ValueError at step 12 ended attempt 1 too", id="the same error"
        ),
        pytest.param(
            replace(BOOM, rank=3, host="c"), BOOM, "the same ValueError", id="of another rank"
        ),
        pytest.param(
            EARLY, EARLY, "the same ValueError before the first step", id="before the first step"
        ),
        pytest.param(
            replace(BOOM, summary="ValueError: <Thing object at 0x7f01> is odd"),
            replace(BOOM, summary="ValueError: <Thing object at 0x7fee> is odd"),
            "the same ValueError",
            id="but for an address in its text",
        ),
        pytest.param(IMPORTS, None, "ImportError comes back at every attempt", id="an import"),
    ],
)
def test_a_failure_that_comes_back_is_final(
    now: RankFailure, before: RankFailure | None, why: str
) -> None:
    """However many restarts are left; the reason is given."""
    decision = after(now, before, left=5)
    assert (decision.action, decision.is_final) == (Action.RAISE, True)
    assert why in decision.why


@pytest.mark.parametrize(
    ("now", "before"),
    [
        pytest.param(BOOM, None, id="the first failure"),
        pytest.param(BOOM, replace(BOOM, step=11), id="another step"),
        pytest.param(BOOM, EARLY, id="a step after none"),
        pytest.param(BOOM, replace(BOOM, summary="ValueError: bang"), id="another text"),
        pytest.param(BOOM, replace(BOOM, exception_type="builtins.TypeError"), id="another type"),
        pytest.param(BOOM, KILLED, id="after a kill"),
        pytest.param(KILLED, KILLED, id="two kills"),
        pytest.param(*(replace(KILLED, kind="exit"),) * 2, id="two exits"),
        pytest.param(*(replace(BOOM, retryability="transient"),) * 2, id="two OSErrors"),
        pytest.param(COLLATERAL, COLLATERAL, id="two lost connections"),
    ],
)
def test_any_other_failure_of_a_rank_is_tried_again(
    now: RankFailure, before: RankFailure | None
) -> None:
    """As long as restarts are left; then its error is raised, and a retry may follow."""
    assert after(now, before, left=1).action is Action.RESTART
    decision = after(now, before, left=0)
    assert (decision.action, decision.is_final) == (Action.RAISE, False)


def test_errors_without_a_step_do_not_count_as_the_same_if_steps_are_unknown() -> None:
    """A plain function may have made any number of its own steps."""
    assert after(EARLY, EARLY, knows_steps=False).action is Action.RESTART


@pytest.mark.parametrize(
    "error", [pytest.param(LOST, id="a lost worker"), pytest.param(HUNG, id="a hang")]
)
def test_losses_and_hangs_are_tried_again_however_often(error: GangError) -> None:
    """Their record is a line for people, and never equals another."""
    failure = failed(error)
    record = failure.record
    assert (record.attempt, record.world_size, record.fingerprint) == (2, 4, None)
    assert record.summary == str(error).splitlines()[0]
    assert decide(failure, record, 1).action is Action.RESTART
    assert decide(failure, record, 0) == Decision(Action.RAISE, "all tries are used up")


@pytest.mark.parametrize(
    ("saved_step", "moved_at", "left", "action"),
    [
        pytest.param(4, 0, 0, Action.MOVE, id="the first move"),
        pytest.param(9, 4, 0, Action.MOVE, id="a move after more steps"),
        pytest.param(9, 9, 0, Action.RAISE, id="a move that gained nothing"),
        pytest.param(9, 9, 1, Action.RESTART, id="the same, with a restart left"),
        pytest.param(None, 0, 1, Action.RESTART, id="nothing was saved"),
    ],
)
def test_a_worker_that_left_gracefully_moves_the_gang(
    saved_step: int | None, moved_at: int, left: int, action: Action
) -> None:
    """It uses up no restart, provided at least one step was made since the last move."""
    failure = failed(WorkerLostError("worker x was closed", saved_step), moved_at=moved_at)
    assert failure.record.is_move == (action is Action.MOVE)
    assert decide(failure, None, left).action is action


def test_a_gang_that_stopped_to_grow_grows() -> None:
    """It uses up no restart, and the reason is what the gang said."""
    failure = failed(GangGrowsError("there are workers for 4 ranks"))
    assert failure.record.is_move
    assert decide(failure, None, 0) == Decision(Action.GROW, "there are workers for 4 ranks")


def caused(cause: BaseException | None) -> Exception:
    """Make an error of a task that has a cause."""
    error = RuntimeError("it failed")
    error.__cause__ = cause
    return error


TRIED_AGAIN: dict[str, Any] = {
    "a rank's failure": RankFailedError(BOOM, 3),
    "a lost worker": LOST,
    "a hang": HUNG,
    "too few workers": NotEnoughWorkersError("have 1, need 2"),
    "a storage that failed": StorageError("timed out"),
    "a damaged checkpoint": CheckpointError("damaged"),
    "the user's own": caused(None),
    "the user's own with a cause": caused(OSError("no")),
    "no error": None,
}
FINAL: dict[str, BaseException] = {
    "a rank's failure that comes back": RankFailedError(BOOM, 3).as_final("it comes back"),
    "a cancel": GangCancelledError("cancelled"),
    "wrong parameters": InvalidParamsError("no"),
    "a newer format": NewerFormatError("format 2"),
    "a lost scheduler": SchedulerLostError("gone"),
    "superseded": SupersededError("attempt 2 has begun"),
    "versions that don't go together": VersionConflictError("torch 2.14, 2.15"),
    "an import": caused(ImportError("torchvision")),
    "a syntax error": caused(SyntaxError("here")),
    "an import of the task's own": ImportError("torchvision"),
    "a cause of a newer format": caused(NewerFormatError("format 2")),
}


@pytest.mark.parametrize("kind", TRIED_AGAIN)
def test_a_failed_task_is_retried_while_retries_are_left(kind: str) -> None:
    """If its failure may pass."""
    failure = TaskFailure(TRIED_AGAIN[kind])
    assert decide(failure, None, 1).action is Action.RESTART
    assert decide(failure, None, 0).action is Action.RAISE


@pytest.mark.parametrize("kind", FINAL)
def test_a_failed_task_is_not_retried_if_its_failure_comes_back(kind: str) -> None:
    """Nor if nobody wants another try."""
    decision = decide(TaskFailure(FINAL[kind]), None, 5)
    assert (decision.action, decision.is_final) == (Action.RAISE, True)


@pytest.mark.parametrize("kind", ["a cancel", "superseded", "wrong parameters"])
def test_a_task_whose_worker_leaves_moves_if_it_was_stopped_for_that(kind: str) -> None:
    """It uses up no retry, and what ended otherwise doesn't move."""
    action = decide(TaskFailure(FINAL[kind], worker_leaves=True), None, 0).action
    assert action is (Action.RAISE if kind == "wrong parameters" else Action.MOVE)


@pytest.mark.parametrize(
    ("lives", "left", "action"),
    [
        pytest.param(True, 1, Action.RESTART, id="the cluster lives"),
        pytest.param(True, 0, Action.RAISE, id="no retry is left"),
        pytest.param(False, 5, Action.RAISE, id="the cluster is lost too"),
    ],
)
@pytest.mark.parametrize("loss", [SupervisorLostError, SchedulerLostError])
def test_a_task_lost_with_its_worker_is_submitted_again(
    loss: type[GangError], lives: bool, left: int, action: Action
) -> None:
    """If its cluster lives, at the cost of a retry."""
    failure = TaskLoss(loss("worker x died while it ran the task itself"), lives)
    assert decide(failure, None, left).action is action


def test_a_final_error_says_so() -> None:
    """That no other attempt is made, and why."""
    error = RankFailedError(BOOM, 2).as_final("it comes back")
    assert str(error).splitlines()[:2] == [
        "rank 1 on b failed in attempt 2: ValueError: boom",
        "not tried again: it comes back",
    ]
