"""A unit test starts no process, and has no server: whoever tries fails at once."""

import multiprocessing.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

WAYS = (
    (os, "fork"),
    (os, "posix_spawn"),
    (subprocess.Popen, "_execute_child"),
    (multiprocessing.util, "spawnv_passfds"),
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Shut every way to a process while a unit test and its fixtures run."""
    if Path(__file__).parent not in item.path.parents:  # pytest asks for all tests, not for ours
        return (yield)

    def refuse(*_args: object, **_options: object) -> None:
        pytest.fail("a unit test starts no process: such a test belongs in tests/integration")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in WAYS:
            patch.setattr(owner, name, refuse)
        return (yield)
