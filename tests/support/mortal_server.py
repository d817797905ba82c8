"""A Prefect server of a test's own, which is killed and comes back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.support.ports import free_port
from tests.support.separate_cluster import end
from tests.support.servers import drain_prefect, start_prefect_server

if TYPE_CHECKING:
    import subprocess


class Server:
    """A Prefect server with its own database and port."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.leases = home / "concurrency_leases"
        self.url = f"http://127.0.0.1:{self._port}/api"

    def start(self) -> None:
        """Start it, for the first time or again; returns when it answers."""
        with (self._home / "server.log").open("ab") as log:
            self._process = start_prefect_server(self._home, self._port, log.fileno())
        assert self._process is not None

    def kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            end(psutil.Process(self._process.pid))
        self._process.wait()


@contextmanager
def mortal_server(folder: Path) -> Iterator[Server]:
    """Run a server that may be killed; flows of the context talk to it."""
    folder.mkdir()
    server = Server(folder)
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PREFECT_API_URL", server.url)
            with temporary_settings({PREFECT_API_URL: server.url}):
                yield server
    finally:
        drain_prefect()  # else the process's later tests would send their events to this server
        server.kill()
