"""How a rank process prepares itself."""

import multiprocessing.context
from typing import Any

import pytest

from prefect_torch_ddp.rank.main import default_to_fork


def test_data_workers_are_forked_unless_the_user_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fork server by default, as in Python 3.14; the user's own choice is no error."""
    default: Any = multiprocessing.context._default_context
    monkeypatch.setattr(default, "_default_context", multiprocessing.get_context("forkserver"))
    monkeypatch.setattr(default, "_actual_context", None)
    default_to_fork()
    assert multiprocessing.get_start_method(allow_none=True) is None
    assert multiprocessing.get_context().get_start_method() == "fork"
    monkeypatch.setattr(default, "_actual_context", None)
    multiprocessing.set_start_method("spawn")
    assert multiprocessing.get_start_method() == "spawn"
