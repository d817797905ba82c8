"""What is printed of an error."""

import logging
import sys

import pytest
import torch

from prefect_torch_ddp import InvalidParamsError
from prefect_torch_ddp.tasks.watch.frames import WithoutFrames, users_frames

TRACEBACK = f"""Traceback (most recent call last):
  File "{torch.__file__}", line 1, in call
    return fn()
           ^^^^
  File "/home/me/train.py", line 7, in train
    loss = model(x)
           ^^^^^^^^
  File "{torch.__file__}", line 2, in forward
    return 1
ValueError: first line
second line
  File names may begin like this"""
LEFT = """Traceback (most recent call last):
  File "/home/me/train.py", line 7, in train
    loss = model(x)
           ^^^^^^^^
ValueError: first line
second line
  File names may begin like this"""


def test_only_the_users_frames_are_left() -> None:
    """With their code, and the whole text of the error."""
    assert users_frames(TRACEBACK) == LEFT


def test_without_a_frame_of_the_users_all_are_left() -> None:
    """Their code may be an installed package."""
    installed = TRACEBACK.replace("/home/me", "/opt/lib/python3.11/site-packages/mine")
    assert users_frames(installed) == installed


@pytest.mark.parametrize(
    ("error", "has_frames"),
    [(InvalidParamsError("refused"), False), (ValueError("a bug"), True)],
    ids=["ours", "another"],
)
def test_the_log_has_no_frames_of_our_own_errors(error: Exception, *, has_frames: bool) -> None:
    """Those of other errors are left; and other handlers get the whole record."""
    try:
        raise error
    except type(error):
        record = logging.LogRecord("x", 40, __file__, 1, "failed: %s", (error,), sys.exc_info())
    text = WithoutFrames(logging.Formatter("%(message)s")).format(record)
    assert text.splitlines()[0] == f"failed: {error}"
    assert ("Traceback" in text) == has_frames
    assert record.exc_info is not None
