"""The leak police: a test fails that leaves an environment variable, thread, process or group.

Its fixtures are autouse, so set up first and torn down last, after the test's own have cleaned up.
"""

import contextlib
import multiprocessing
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import becomes_true

GRACE_S = 30.0
ENVIRONMENT_OF_TOOLS = {
    *("PYTEST_CURRENT_TEST", "__DASK_PARENT_PID", "PYTHONHASHSEED"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"),
}
"""Set by pytest, Dask's nanny, scikit-learn as it loads, and torch's first optimizer."""


@pytest.fixture(autouse=True)
def _no_leaked_environment() -> Iterator[None]:
    """Fail a test after which os.environ differs."""

    def snapshot() -> dict[str, str]:
        return {
            name: value for name, value in os.environ.items() if name not in ENVIRONMENT_OF_TOOLS
        }

    before = snapshot()
    yield
    after = snapshot()
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    if changed:
        for name in changed:
            os.environ.pop(name, None)
        os.environ.update(before)
        pytest.fail(f"the test changed environment variables: {', '.join(changed)}")


@pytest.fixture(autouse=True)
def _no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves a thread which would keep Python from exiting."""
    before = set(threading.enumerate())

    def leaked() -> list[threading.Thread]:
        return [
            thread
            for thread in threading.enumerate()
            if thread not in before and not thread.daemon and not _may_stay(thread)
        ]

    yield
    if not becomes_true(lambda: not leaked(), GRACE_S):
        pytest.fail(f"the test left threads: {', '.join(thread.name for thread in leaked())}")


def _may_stay(thread: threading.Thread) -> bool:
    """Tell whether its owner keeps this thread for the life of the process, by design, and ends
    it at exit."""
    return thread.name.startswith(("Dask-Offload", "ptd-read"))


@pytest.fixture(autouse=True)
def _no_leaked_processes() -> Iterator[None]:
    """Fail a test that leaves a descendant process; servers of wider fixtures are older than
    the baseline."""
    before = set(_descendants())

    def leaked() -> list[psutil.Process]:
        # The host of a worker of a wider fixture is meant to stay, and so are the processes of its
        # browser; the session's end looks for them too.
        return [
            process
            for process in _descendants()
            if process not in before
            and not _is_fork_server(process)
            and not _is_of_browser(process, before)
        ]

    yield
    if not becomes_true(lambda: not leaked(), GRACE_S):
        left = sorted(leaked(), key=lambda process: process.pid)
        lines = [_describe(process) for process in left]
        _kill(left)
        pytest.fail("the test left processes:\n" + "\n".join(lines))


@pytest.fixture(autouse=True)
def _no_leaked_process_group() -> Iterator[None]:
    """Fail a test that leaves torch's process group up in this process."""
    yield
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
            pytest.fail("the test left torch's process group initialised")


def _descendants() -> list[psutil.Process]:
    multiprocessing.active_children()  # reaps its own dead
    if _is_childless():
        return []
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and not _is_service(process, command):
                found.append(process)
    return found


def _is_childless() -> bool:
    """Tell, without the look at all processes of the machine that psutil takes, whether this one
    has no children; most unit tests have none."""
    with contextlib.suppress(OSError):  # a thread may end meanwhile
        found = [path.read_bytes() for path in Path("/proc/self/task").glob("*/children")]
        return bool(found) and not any(found)
    return False


def _is_fork_server(process: psutil.Process) -> bool:
    """Tell a Dask worker's warm fork server, which ends with its worker, from the ranks that it
    forks: those are ddp-rank-<n>."""
    with contextlib.suppress(psutil.Error):
        is_rank = process.name().startswith("ddp-rank-") and process.name() != "ddp-fork-server"
        return "prefect_torch_ddp.rank.process.fork_server" in process.cmdline() and not is_rank
    return False


def _is_of_browser(process: psutil.Process, before: set[psutil.Process]) -> bool:
    """Tell a process of a browser that is older than the test: Chromium answers before it has
    started those for its pages, its network and its drawing, starts another one when it likes, and
    ends all of them with the browser."""
    with contextlib.suppress(psutil.Error):
        program = next(iter(process.cmdline()), "")  # empty while the kernel ends a process
        return "chrom" in Path(program).name and process.parent() in before
    return False


def _is_service(process: psutil.Process, command: list[str]) -> bool:
    """Tell what a library starts once and keeps: multiprocessing's helpers and Prefect's
    embedded server."""
    line = " ".join(command)
    if "prefect.server.api.server:create_app" in line:
        return process.ppid() == os.getpid()  # a Dask worker that starts one of its own is a fault
    return "multiprocessing.resource_tracker" in line or "multiprocessing.forkserver" in line


def _stop_embedded_server() -> None:
    """Stop what Prefect would stop at exit, which is too late for the check of the whole
    session."""
    if module := sys.modules.get("prefect.server.api.server"):
        for server in list(module.SubprocessASGIServer._instances.values()):
            server.stop()


def _describe(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline())[:300]
        return f"  {process.pid} (parent {process.ppid()}, {process.status()}): {command}"
    except psutil.Error:
        return f"  {process.pid}: gone by now"


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=GRACE_S)


def _of_this_session() -> list[psutil.Process]:
    """Find every living process that inherited our mark, whoever its parent is now, and our own
    forks, which show no new mark."""
    mark = f"PTD_TEST_SESSION={os.environ['PTD_TEST_SESSION']}".encode()
    found = set(_descendants())
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes().split(
                b"\0"
            ):
                process = psutil.Process(pid)
                if not _is_service(process, process.cmdline()):
                    found.add(process)
    return sorted(found, key=lambda process: process.pid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the whole session when a process that it started outlives it."""
    _stop_embedded_server()
    for text in filter(None, _left_by_workers):
        _fail(session, text)
    if not becomes_true(lambda: not _of_this_session(), 2 * GRACE_S):
        left = _of_this_session()
        text = (
            "\nprocesses outlived the suite and were killed:\n"
            + "\n".join(map(_describe, left))
            + "\n"
        )
        _kill(left)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left"] = (
                text  # a worker of xdist has no exit status that counts
            )
        else:
            _fail(session, text)
    shutil.rmtree(os.environ["PTD_TEST_HOME"], ignore_errors=True)


def _fail(session: pytest.Session, text: str) -> None:
    sys.stderr.write(text)
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


_left_by_workers: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Hear what a worker of xdist says of processes that outlived its part of the suite."""
    _left_by_workers.append(getattr(node, "workeroutput", {}).get("left", ""))
