"""Owns what every test relies on: a private and quiet environment, real servers, and the leak
police."""

import contextlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from distributed import Client, LocalCluster

    from tests.integration.ceph_server import CephServer

pytest.register_assert_rewrite("tests.storage_conformance", "tests.s3_conformance")

SESSION_ID = uuid.uuid4().hex
GRACE_S = 30.0
SERVER_READY_S = 300.0
ENVIRONMENT_OF_TOOLS = {
    *("PYTEST_CURRENT_TEST", "__DASK_PARENT_PID", "PYTHONHASHSEED"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"),
}
"""Set by pytest, by Dask's nanny in the process that starts workers, by scikit-learn as it
loads, by torch's first optimizer."""
FOLDERS = ("unit", "integration", "chaos", "gpu")
NEEDS_PACKAGES = {"ceph_server", "batch_system"}
"""Fixtures whose servers come from Debian packages: `make integration` installs them."""

_home = Path(tempfile.mkdtemp(prefix="ptd-tests-"))

# Before any test module is collected: prefect and distributed read these when they are
# imported.
os.environ.update(
    {
        "PTD_TEST_SESSION": SESSION_ID,  # every descendant inherits it, also one that got away from our process tree
        "PREFECT_HOME": str(_home / "prefect"),
        "PREFECT_LOGGING_LEVEL": "WARNING",
        # Else the line above would keep the runs' own INFO records from the server too, and
        # tests read them there.
        "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
        "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
        # Of the server that Prefect embeds where none is configured: 20 s are too few where two
        # processes test on two cores.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "DO_NOT_TRACK": "1",
        "DASK_LOGGING__DISTRIBUTED": "warning",
        "AWS_EC2_METADATA_DISABLED": "true",
        "MPLBACKEND": "Agg",
    }
)
# A plain LocalCluster's nanny sets these in this process and leaves them there, unless they are
# set.
for _name, _value in (
    ("MALLOC_TRIM_THRESHOLD_", "65536"),
    *((f"{lib}_NUM_THREADS", "1") for lib in ("OMP", "MKL", "OPENBLAS")),
):
    os.environ.setdefault(_name, _value)
# The developer's own server, account and launcher are none of a test's business.
for _name in (
    "PREFECT_API_URL",
    "PREFECT_API_KEY",
    "PREFECT_PROFILE",
    "AWS_PROFILE",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
):
    os.environ.pop(_name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder and by what it needs, so that no selection depends on an author's memory."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in FOLDERS[1:]:
            item.add_marker(folder)
        if NEEDS_PACKAGES & set(getattr(item, "fixturenames", ())):
            item.add_marker("extended")


def _becomes_true(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return true


# ---- The leak police: autouse, so set up first and torn down last, after the test's own
# fixtures have cleaned up.


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
    if not _becomes_true(lambda: not leaked(), GRACE_S):
        pytest.fail(f"the test left threads: {', '.join(thread.name for thread in leaked())}")


def _may_stay(thread: threading.Thread) -> bool:
    """Tell whether a library keeps this thread for the life of the process, by design, and ends
    it at exit."""
    return thread.name.startswith("Dask-Offload")


@pytest.fixture(autouse=True)
def _no_leaked_processes() -> Iterator[None]:
    """Fail a test that leaves a descendant process; servers of wider fixtures are older than
    the baseline."""
    before = set(_descendants())

    def leaked() -> list[psutil.Process]:
        # The host of a worker of a wider fixture is meant to stay; the session's end looks for
        # it too.
        return [
            process
            for process in _descendants()
            if process not in before and not _is_rank_host(process)
        ]

    yield
    if not _becomes_true(lambda: not leaked(), GRACE_S):
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
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and not _is_service(process, command):
                found.append(process)
    return found


def _is_rank_host(process: psutil.Process) -> bool:
    """Tell a Dask worker's warm rank host, which ends with its worker, from the ranks that it
    forks: those are ddp-rank-<n>."""
    with contextlib.suppress(psutil.Error):
        is_rank = process.name().startswith("ddp-rank-") and process.name() != "ddp-rank-host"
        return "prefect_torch_ddp.rank.fork_server" in process.cmdline() and not is_rank
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
        return f"  {process.pid} (parent {process.ppid()}, {process.status()}): {' '.join(process.cmdline())[:300]}"
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
    mark = f"PTD_TEST_SESSION={SESSION_ID}".encode()
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
    if not _becomes_true(lambda: not _of_this_session(), 2 * GRACE_S):
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
    shutil.rmtree(_home, ignore_errors=True)


def _fail(session: pytest.Session, text: str) -> None:
    sys.stderr.write(text)
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


_left_by_workers: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Hear what a worker of xdist says of processes that outlived its part of the suite."""
    _left_by_workers.append(getattr(node, "workeroutput", {}).get("left", ""))


# ---- Real servers. Wide in scope since they cost seconds; heavy imports stay inside, so that
# unit tests start at once.


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a real Prefect server, with a home and a SQLite file of its own; give its API URL."""
    home = tmp_path_factory.mktemp("prefect-server")
    with (home / "server.log").open("wb") as log:
        process, url = _start_prefect_server(home, log.fileno())
        try:
            yield url
        finally:
            _drain_prefect()
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _drain_prefect() -> None:
    """Have Prefect send what it still holds: at exit it would try a stopped server for a
    minute."""
    if module := sys.modules.get("prefect.logging.handlers"):
        module.APILogWorker.drain_all(timeout=10)
    if module := sys.modules.get("prefect.events.worker"):
        module.EventsWorker.drain_all(timeout=10)


def _start_prefect_server(home: Path, log: int) -> tuple[subprocess.Popen[bytes], str]:
    for _ in range(3):  # another process may take the free port before the server does
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--no-ui",
        ]
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | {"PREFECT_HOME": str(home)}
        )
        _becomes_true(partial(_has_settled, process, port), SERVER_READY_S)
        if _is_ready(process, port):
            return process, f"http://127.0.0.1:{port}/api"
        process.kill()
        process.wait()
    pytest.fail("the Prefect server did not start:\n" + (home / "server.log").read_text()[-4000:])


def _has_settled(process: subprocess.Popen[bytes], port: int) -> bool:
    return process.poll() is not None or _is_ready(process, port)


def _is_ready(process: subprocess.Popen[bytes], port: int) -> bool:
    """Tell whether our own server answers: one of somebody else's on the same port would answer
    too, and get our test's runs."""
    try:
        sockets = psutil.Process(process.pid).net_connections("tcp")
        if not any(
            found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in sockets
        ):
            return False
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, psutil.Error):
        return False


@pytest.fixture
def prefect_api(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make the real server the one that flows of this test, and processes that it starts, talk
    to."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        yield prefect_server


@pytest.fixture(scope="session")
def ceph_server() -> Iterator["CephServer"]:
    """Run a real Ceph RADOS Gateway, or skip the test with what to install.

    User `owner` may do all, user `reader` reads.
    """
    from tests.integration.ceph_server import run_ceph

    with run_ceph(_home / "ceph") as server:
        yield server


@pytest.fixture(scope="session")
def dask_cluster() -> Iterator["LocalCluster"]:
    """Run a real cluster: two worker processes of one thread.

    A test that kills or stops workers makes its own.
    """
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        yield cluster


@pytest.fixture
def dask_client(dask_cluster: "LocalCluster") -> Iterator["Client"]:
    """Connect to the shared cluster, all its workers there."""
    from distributed import Client

    with Client(dask_cluster) as client:
        client.wait_for_workers(2, timeout=30)
        yield client
