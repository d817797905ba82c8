"""The frames that an error shows."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from prefect_torch_ddp import InvalidParamsError, RankFailedError, storage_from_uri
from prefect_torch_ddp.frames import users_frames, users_traceback
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


def test_an_error_of_this_process_shows_the_users_frames_and_causes() -> None:
    """A cause within a library only isn't shown: our errors' texts say what it was."""
    with pytest.raises(InvalidParamsError) as caught:
        storage_from_uri("ftp://host/runs")
    caught.value.add_note("a note")
    caught.value.__cause__ = _raised_by(json.loads)
    head, frame, code, *text, note = users_traceback(caught.value).splitlines()[:100]
    assert head == "Traceback (most recent call last):"
    assert f'File "{__file__}"' in frame
    assert code.strip() == 'storage_from_uri("ftp://host/runs")'
    assert "\n".join(text) == f"prefect_torch_ddp.InvalidParamsError: {caught.value}"
    assert note == "a note"
    caught.value.__cause__ = _raised_by(_of_the_user)
    assert "ZeroDivisionError" in users_traceback(caught.value)


def test_ipython_and_python_show_an_error_of_ours_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Python prints other errors in its own way."""
    with pytest.raises(InvalidParamsError) as caught:
        storage_from_uri("ftp://host/runs")
    shown = users_traceback(caught.value)
    assert caught.value._render_traceback_() == shown.splitlines()
    sys.excepthook(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err == shown
    other = _raised_by(json.loads)
    sys.excepthook(type(other), other, other.__traceback__)
    assert "json/__init__.py" in capsys.readouterr().err


def _of_the_user(_: object) -> None:
    raise ZeroDivisionError


def _raised_by(function: Callable[[str], object]) -> Exception:
    """Return what a function raises, without the frame of its call."""
    with pytest.raises((ValueError, ZeroDivisionError)) as caught:
        function("{")
    assert caught.tb is not None
    return caught.value.with_traceback(caught.tb.tb_next)
