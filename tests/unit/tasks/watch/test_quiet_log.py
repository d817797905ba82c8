"""What Prefect's log has of an error."""

import logging
import sys

import pytest
from prefect.states import Failed

from prefect_torch_ddp import InvalidParamsError
from prefect_torch_ddp.tasks.watch.quiet_log import WithoutFrames


@pytest.mark.parametrize(
    ("error", "has_frames"),
    [(InvalidParamsError("refused"), False), (ValueError("a bug"), True)],
    ids=["ours", "another"],
)
def test_the_log_has_no_frames_of_our_own_errors(error: Exception, *, has_frames: bool) -> None:
    """Those of other errors are left; and other handlers get the whole record.

    Our own errors have the notes that say where the report is.
    """
    error.add_note("the report: here")
    try:
        raise error
    except type(error):
        record = logging.LogRecord("x", 40, __file__, 1, "failed: %s", (error,), sys.exc_info())
    text = WithoutFrames(logging.Formatter("%(message)s")).format(record)
    assert text.splitlines()[0] == f"failed: {error}"
    assert text.splitlines()[-1] == "the report: here"
    assert ("Traceback" in text) == has_frames
    assert record.exc_info is not None


def test_a_failed_state_is_logged_by_its_first_line() -> None:
    """Prefect logs its repr, also of an error without a traceback; a user's own text is left."""
    traceback = 'Traceback (most recent call last):\n  File "a.py", line 1, in train'
    shown = {
        f"ranks 0, 1 failed: it's {{wrong}}\nnot tried again\n\n{traceback}": (
            r"Finished in state Failed('ranks 0, 1 failed: it\'s {wrong}')"
        ),
        f"rank 0 failed\n\n{traceback}": "Finished in state Failed('rank 0 failed')",
        "Task run encountered an exception GangHungError: it hung\nraise the limit\n\nrank 1": (
            "Finished in state Failed('Task run encountered an exception GangHungError: it hung')"
        ),
        "Flow run encountered an exception: RankFailedError: it's\nnot tried again": (
            'Finished in state Failed("Flow run encountered an exception: RankFailedError: it\'s")'
        ),
        "one\ntwo": "Finished in state Failed('one\\ntwo')",
    }
    formatter = WithoutFrames(logging.Formatter("%(message)s"))
    for message, line in shown.items():
        logged = f"Finished in state {Failed(message=message)}"
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, logged, None, None)
        assert formatter.format(record) == line
        assert record.getMessage() == logged, "other handlers get the whole of it"
