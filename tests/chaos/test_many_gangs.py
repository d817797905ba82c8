"""Nothing remains after 200 gangs that ended in every way."""

from pathlib import Path

import pytest

from tests.support.many_gangs import assert_nothing_is_left


@pytest.mark.timeout(1800)
def test_nothing_is_left_of_200_gangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, port, file descriptor, thread or temporary file remains after the gangs."""
    assert_nothing_is_left(tmp_path, monkeypatch, 200)
