"""The frames that an error shows."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from prefect_torch_ddp import (
    InvalidParamsError,
    PrefectTorchDdpError,
    RankFailedError,
    storage_from_uri,
)
from prefect_torch_ddp.frames import shorten_uncaught, users_frames, users_stacks, users_traceback
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


def test_a_traceback_of_this_package_only_is_not_shown() -> None:
    """Its errors say what to do; where the whole is kept is said."""
    ours = TRACEBACK.replace(torch.__file__, "/lib/python3.11/prefect_torch_ddp/rank/stages.py")
    ours = ours.replace("/home/me/train.py", "/src/prefect_torch_ddp/data/fetching.py")
    assert users_frames(ours) == ""
    failure = replace(BOOM, traceback_text=ours, log_uri="/runs/logs/000001-*.txt")
    assert str(RankFailedError(failure, 1)).splitlines()[1:] == [
        "the whole traceback: /runs/logs/000001-*.txt"
    ]


def test_a_traceback_that_ends_in_an_error_of_ours_is_not_shown() -> None:
    """Nor one through Python's own modules only: a module that isn't there, say."""
    installed = TRACEBACK.replace("/home/me", "/opt/lib/python3.11/site-packages/mine")
    chained = (
        f"{installed}\n\nThe above exception was the direct cause of the following exception:\n\n"
        f"{installed.replace('ValueError', 'prefect_torch_ddp.UnpicklableValueError')}"
    )
    assert users_frames(chained) == ""
    cause_of_ours = installed.replace("ValueError", "prefect_torch_ddp.InvalidParamsError")
    assert users_frames(f"{cause_of_ours}\n\n{installed}")
    python = TRACEBACK.replace(torch.__file__, "/lib/python3.11/importlib/__init__.py")
    python = python.replace("/home/me/train.py", "/src/prefect_torch_ddp/rank/user_code.py")
    assert users_frames(python) == ""


def test_an_error_that_is_followed_by_a_restart_shows_the_innermost_frame() -> None:
    """All of the user's frames, if the traceback is kept nowhere else."""
    failure = replace(BOOM, traceback_text=TRACEBACK, log_uri="/runs/logs/000001-*.txt")
    assert RankFailedError(failure, 1).in_brief().splitlines()[1:] == [
        '  File "/home/me/train.py", line 7, in train',
        "    loss = model(x)",
        "the whole traceback: /runs/logs/000001-*.txt",
    ]
    unkept = RankFailedError(replace(failure, log_uri=""), 1)
    assert unkept.in_brief() == str(unkept)
    killed = RankFailedError(replace(failure, traceback_text=""), 1)
    assert killed.in_brief() == str(killed)


def test_a_hint_is_given_once_by_the_error_itself() -> None:
    """It comes after the first line; a log in which more attempts follow would repeat it."""
    error = RankFailedError(replace(BOOM, traceback_text="", hint="see dmesg"), 1)
    first, hint, *_ = str(error).splitlines()
    assert hint == "see dmesg"
    assert error.in_brief() == first


def test_stacks_show_the_users_threads_and_what_led_to_no_call_of_theirs() -> None:
    """The main thread always."""
    ours = '  File "/src/prefect_torch_ddp/rank/{}.py", line 5 in run'
    python = '  File "/usr/lib/python3.11/threading.py", line 331 in wait'
    torch_s = '  File "/v/lib/python3.11/site-packages/torch/_tensor.py", line 623 in backward'
    mine = '  File "/home/me/train.py", line 27 in train'
    threads = [
        ["Thread 0x0a (most recent call first):", python, ours.format("records"), python],
        ["Thread 0x0b (most recent call first):", python, mine, python],
        ["Current thread 0x0c (most recent call first):", ours.format("link"), python],
        ["Thread 0x0d (most recent call first):", torch_s, mine, ours.format("stages")],
    ]
    threads[-1] += ['  File "<frozen runpy>", line 88 in _run_code']
    shown = users_stacks("\n\n".join(map("\n".join, threads)) + "\n")
    assert shown.split("\n\n") == ["\n".join(threads[1]), "\n".join(threads[-1][:3])]
    waits = ["Thread 0x0d (most recent call first):", ours.format("loop"), ours.format("stages")]
    assert users_stacks("\n".join(waits)) == "\n".join(waits)


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


def test_ipython_and_python_show_an_error_of_ours_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python prints other errors in its own way."""
    # In this process, torch.distributed may have put one of its own in front.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shorten_uncaught(PrefectTorchDdpError)
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
