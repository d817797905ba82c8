"""Nothing is left after gangs that ended in every way; tests/chaos does it with 200."""

from pathlib import Path

import pytest

from tests.support.many_gangs import MIX, assert_nothing_is_left


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, port, file descriptor, thread or temporary file is left; one of the gangs is
    of fresh processes."""
    assert_nothing_is_left(tmp_path, monkeypatch, len(MIX))
