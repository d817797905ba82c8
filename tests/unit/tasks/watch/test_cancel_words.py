"""What a cancelled run says: what cancelled it, and what was saved."""

import signal

import pytest
from prefect.exceptions import CancelledRun, TerminationSignal

from prefect_torch_ddp.errors import GangCancelledError, TaskCancelled, saved_by
from prefect_torch_ddp.gang.liveness import UNWANTED
from prefect_torch_ddp.tasks.cancel.states import cancel_in_words

SIGTERM = TerminationSignal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("cause", "by"),
    [
        (KeyboardInterrupt(), " by Ctrl-C (SIGINT)"),
        (SIGTERM, " by SIGTERM"),
        (CancelledRun("the flow run was cancelled in Prefect"), " in Prefect"),
        (None, ""),
    ],
)
def test_a_cancelled_flow_says_what_cancelled_it(cause: BaseException | None, by: str) -> None:
    """The message had the cancellation of a Dask task, whatever the user had done."""
    stopped = TaskCancelled("all ranks stopped after step 7")
    stopped.__cause__ = cause
    assert cancel_in_words(stopped) == f"cancelled{by}: all ranks stopped after step 7"


@pytest.mark.parametrize(
    ("signalled", "by"), [(KeyboardInterrupt(), "Ctrl-C (SIGINT)"), (SIGTERM, "SIGTERM")]
)
def test_a_flow_that_is_cancelled_before_its_first_task_says_by_what(
    signalled: BaseException, by: str
) -> None:
    """No task has anything to say of how it ended."""
    assert cancel_in_words(signalled) == f"cancelled by {by}"


def test_what_a_cancelled_gang_saved_is_said_without_the_rest() -> None:
    """The error has both; one whose ranks were killed only says by what."""
    error = GangCancelledError(f"gang 'x train' was stopped by {UNWANTED}", 7, 7)
    saved = "all ranks stopped after step 7; the newest checkpoint is of step 7"
    assert saved_by(error) == saved
    assert str(error) == f"gang 'x train' was stopped by {UNWANTED}; {saved}"
    assert "Dask task" not in str(error)
    assert saved_by(GangCancelledError("cancelled")) == ""
