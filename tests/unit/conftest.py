"""A unit test starts no process, and has no server: whoever tries fails at once."""

import multiprocessing.util
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest

WAYS: tuple[tuple[Any, str], ...] = (
    (os, "fork"),
    (os, "posix_spawn"),
    (subprocess, "_fork_exec"),
    (multiprocessing.util, "spawnv_passfds"),
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Shut every way to a process while a unit test and its fixtures run."""
    if Path(__file__).parent not in item.path.parents:  # pytest asks for all tests, not for ours
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in WAYS:
            patch.setattr(owner, name, partial(_start, getattr(owner, name)))
        return (yield)


def _start(start: Callable[..., Any], *args: Any, **options: Any) -> Any:
    frames = (frame.f_code.co_filename for frame, _ in walk_stack(None))
    if any(name.startswith("<frozen importlib") for name in frames):
        return start(*args, **options)  # torch asks ldconfig for libraries as it loads
    return pytest.fail("a unit test starts no process: such a test belongs in tests/integration")
