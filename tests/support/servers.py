"""Real servers as fixtures: Prefect, Dask, Ceph. Wide in scope, since they cost seconds."""

import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from prefect_torch_ddp.server import server_environment
from tests.support.ports import free_port
from tests.support.waiting import HANG_S, becomes_true, wait_until

if TYPE_CHECKING:
    from distributed import Client, LocalCluster

    from prefect_torch_ddp import ClusterParams
    from prefect_torch_ddp.storage.s3.storage import S3Storage
    from tests.support.ceph_server import CephServer
    from tests.support.kill_points import KillPoint
    from tests.support.s3_server import S3Server, Wire
    from tests.support.separate_cluster import SeparateCluster

_DATABASE = "prefect.db"
_OF_A_NEW_SERVER = ("memo_store.toml", _DATABASE)
"""What a server has written by the time that it answers: that it knows Prefect's blocks."""
STOP_S = 30.0
READY_S = 300.0


@pytest.fixture(scope="session")
def prefect_server(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[str]:
    """Run a real Prefect server with its own home and SQLite file; give its API URL.

    Migrations are half of the start of a server without a database. So pytest's cache keeps what
    the first server of this version has made, and others begin with a copy.
    """
    home = tmp_path_factory.mktemp("prefect-server")
    cache = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    name = f"prefect-{metadata.version('prefect')}"
    kept = cache.mkdir(name) if cache else tmp_path_factory.mktemp(name)
    with (kept / "lock").open("w") as lock, ExitStack() as running:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes that test wait for the first server
        if is_kept := (kept / _DATABASE).exists():
            for name in _OF_A_NEW_SERVER:
                shutil.copy(kept / name, home)
            fcntl.flock(lock, fcntl.LOCK_UN)
        url = running.enter_context(prefect_server_in(home))
        if not is_kept:
            _keep_database(home, kept)
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield url


def _keep_database(home: Path, kept: Path) -> None:
    for name in _OF_A_NEW_SERVER[:-1]:
        shutil.copy(home / name, kept)
    part = kept / "part"
    with (
        closing(sqlite3.connect(home / _DATABASE)) as live,
        closing(sqlite3.connect(part)) as copy,
    ):
        live.backup(copy)
    part.replace(kept / _DATABASE)


@contextmanager
def prefect_server_in(home: Path, *, ui: bool = False) -> Iterator[str]:
    """Run a real Prefect server with its home in a folder; give its API URL."""
    with (home / "server.log").open("wb") as log:
        process, url = _start_prefect_server(home, log.fileno(), ui=ui)
        try:
            yield url
        finally:
            drain_prefect()
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def drain_prefect() -> None:
    """Have Prefect send what it still holds: at exit it would try a stopped server for a
    minute."""
    if module := sys.modules.get("prefect.logging.handlers"):
        module.APILogWorker.drain_all(timeout=10)
    if module := sys.modules.get("prefect.events.worker"):
        module.EventsWorker.drain_all(timeout=10)


def _start_prefect_server(
    home: Path, log: int, *, ui: bool = False
) -> tuple[subprocess.Popen[bytes], str]:
    for _ in range(3):  # another process may take the free port before the server does
        port = free_port()
        if process := start_prefect_server(home, port, log, ui=ui):
            return process, f"http://127.0.0.1:{port}/api"
    pytest.fail("the Prefect server did not start:\n" + (home / "server.log").read_text()[-4000:])


def start_prefect_server(
    home: Path, port: int, log: int, *, ui: bool = False
) -> subprocess.Popen[bytes] | None:
    """Start a Prefect server as `make nightly` does, its database in `home`, perhaps with its UIs;
    return it when it answers, None if it didn't start."""
    command = f"prefect server start --host 127.0.0.1 --port {port}".split()
    command += [] if ui else ["--no-ui"]
    api_url = f"http://127.0.0.1:{port}/api"
    environment = server_environment() | {
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_UI_API_URL": api_url,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", *command], stdout=log, stderr=log, env=environment
    )
    becomes_true(lambda: process.poll() is not None or _is_ready(process, port), READY_S)
    if _is_ready(process, port):
        return process
    process.kill()
    process.wait()
    return None


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
    from tests.support.ceph_server import run_ceph

    with run_ceph(Path(os.environ["PTD_TEST_HOME"]) / "ceph") as server:
        yield server


@pytest.fixture(scope="session")
def dask_cluster() -> Iterator["LocalCluster"]:
    """Run a real cluster: two worker processes of one thread.

    A test that kills or stops workers makes its own. `silence_logs` as in `own_cluster`.
    """
    from distributed import LocalCluster

    options: dict[str, Any] = {"dashboard_address": ":0", "silence_logs": False}
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, **options) as cluster:
        yield cluster


@pytest.fixture
def shared(dask_cluster: "LocalCluster") -> "ClusterParams":
    """Name the shared cluster to a flow: its workers and fork servers are warm, and the processes
    have the environment that they were started with."""
    from prefect_torch_ddp import ClusterParams

    return ClusterParams(address=dask_cluster.scheduler_address)


@pytest.fixture
def short_liveness(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take what was silent for 12 s for lost, here and in processes that the test starts."""
    import dask.config

    monkeypatch.setenv("DASK_PREFECT_TORCH_DDP__LIVENESS_TIMEOUT_S", "12")
    with dask.config.set({"prefect-torch-ddp.liveness-timeout-s": 12}):
        yield


@pytest.fixture
def dask_client(dask_cluster: "LocalCluster") -> Iterator["Client"]:
    """Connect to the shared cluster, all its workers there."""
    from distributed import Client

    with Client(dask_cluster) as client:
        client.wait_for_workers(2, timeout=HANG_S)
        yield client


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["S3Server"]:
    """Run an S3 server that checks rights: user `owner` may do all, user `reader` reads."""
    from tests.support.s3_server import run_server

    with run_server(tmp_path_factory.mktemp("s3") / "server.log", checks_rights=True) as server:
        yield server


@pytest.fixture(
    scope="session",
    params=["s3_server", pytest.param("ceph_server", marks=pytest.mark.extended)],
    ids=["moto", "ceph"],
)
def bucket_server(request: pytest.FixtureRequest) -> "S3Server":
    """Give each kind of S3 server, Ceph only in the tests marked `extended`."""
    server: S3Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def chain_bucket_server(
    bucket_server: "S3Server", monkeypatch: pytest.MonkeyPatch
) -> "Iterator[S3Server]":
    """Have the AWS chain of this process find the server, until nothing reads ahead any more: that
    would otherwise connect anew."""
    for name, value in bucket_server.environment().items():
        monkeypatch.setenv(name, value)
    yield bucket_server
    wait_until(lambda: "ptd-table" not in [thread.name for thread in threading.enumerate()])


@pytest.fixture
def chain_s3_server(s3_server: "S3Server", monkeypatch: pytest.MonkeyPatch) -> "S3Server":
    """Have the AWS chain of this process, and of those that it starts, find the server."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture(scope="session")
def open_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["S3Server"]:
    """Run one that lets everyone in: a wire may change requests, which no signature survives."""
    from tests.support.s3_server import run_server

    with run_server(tmp_path_factory.mktemp("s3") / "server.log", checks_rights=False) as server:
        yield server


@pytest.fixture
def wire(open_s3_server: "S3Server") -> "Iterator[Wire]":
    """Give a wire to the open server."""
    from tests.support.s3_server import Wire

    with Wire(open_s3_server.endpoint_url) as wire:
        yield wire


@pytest.fixture
def over_wire(open_s3_server: "S3Server", wire: "Wire") -> "S3Storage":
    """Give a storage that is reached through the wire."""
    return open_s3_server.storage(endpoint_url=wire.endpoint_url)


@pytest.fixture
def others(tmp_path: Path) -> "Iterator[SeparateCluster]":
    """Run a cluster of others: separate processes."""
    from tests.support.separate_cluster import separate_cluster

    with separate_cluster(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture
def strike_at(
    request: pytest.FixtureRequest,
    dask_client: "Client",
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> "Callable[[KillPoint], None]":
    """Return what runs a training through a point's kills.

    On S3 the test uses the fixture open_s3_server or ceph_server.
    """
    from tests.support.kill_strike import strike

    of_s3 = "ceph_server" if "ceph_server" in request.fixturenames else "open_s3_server"

    def at(point: "KillPoint") -> None:
        server = request.getfixturevalue(of_s3) if point.backend == "s3" else None
        strike(dask_client, point, server, tmp_path, lambda: tmp_path_factory.mktemp("undisturbed"))

    return at
