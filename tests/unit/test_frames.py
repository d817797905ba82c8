"""The frames that an error shows."""

from dataclasses import replace

import torch

from prefect_torch_ddp import RankFailedError
from prefect_torch_ddp.frames import users_frames
from tests.support.failures import BOOM

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


def test_an_error_says_where_the_whole_traceback_is() -> None:
    """In the rank's kept lines or, if none are kept, in the error itself."""
    failure = replace(BOOM, traceback_text=TRACEBACK + "\n", log_uri="s3://runs/logs/000001-*.txt")
    assert LEFT in str(RankFailedError(failure, 1))
    kept = str(RankFailedError(failure, 1)).splitlines()
    assert kept[-1] == "the whole traceback: s3://runs/logs/000001-*.txt"
    only_here = str(RankFailedError(replace(failure, log_uri=""), 1)).splitlines()
    assert only_here[-1] == "the whole traceback: traceback_text of this error"
    whole = str(RankFailedError(replace(failure, traceback_text=LEFT), 1))
    assert "the whole traceback" not in whole, "it is shown"
