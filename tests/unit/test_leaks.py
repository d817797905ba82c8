"""What the leak police of tests/support/leaks.py holds for a process that ends as it looks."""

import psutil
import pytest

from tests.support import leaks


def _without_command_line() -> psutil.Process:
    """Find a kernel thread: its command line is empty, as that of a process is which the kernel
    is about to end."""
    for process in psutil.process_iter(["ppid", "cmdline"]):
        if process.info["ppid"] == 2 and process.info["cmdline"] == []:
            return process
    pytest.skip("no kernel thread is visible here")


def test_a_process_without_a_command_line_is_no_browser() -> None:
    """Its command line was indexed, so that a test failed now and then as its worker ended."""
    process = _without_command_line()
    assert not leaks._is_of_browser(process, {psutil.Process(2)})
    assert not leaks._is_fork_server(process)
