"""The Dask worker's side of its fork server, which has torch loaded and forks ranks quickly."""

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

from distributed import Worker, WorkerPlugin

from prefect_torch_ddp.errors import ForkServerUnavailableError, ForkServerUnfitError
from prefect_torch_ddp.gang.settings import seconds_setting
from prefect_torch_ddp.gang.worker.child import Child, has_pidfd
from prefect_torch_ddp.gang.worker.slots import SLOTS
from prefect_torch_ddp.protocol.rank import ForkServerAnswer, ForkServerOrder, RankFiles

logger = logging.getLogger(__name__)

BOOT_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 5.0
"""A server that doesn't answer an order for this long is stopped or starved: it is given up."""
AGENT_LIMIT_S = 30.0
"""The longest that a closing worker waits for its agent; its nanny may kill it sooner."""
IDLE_S = 1800.0
"""A server without ranks ends after this long; the next gang starts a new one."""
IDLE_SETTING = "prefect-torch-ddp.fork-server.idle-s"
"""The setting in Dask's configuration that changes it, on the worker."""


def idle_s() -> float:
    """Return how many seconds a fork server of this Dask worker may live without ranks."""
    return seconds_setting(IDLE_SETTING, IDLE_S)


class ForkServer:
    """A running fork server and the socket to it. Safe between threads."""

    def __init__(self) -> None:
        """Start the process; it loads torch meanwhile, see `wait_until_ready`."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Thread pools would start while numpy and torch load; a process with threads can't fork.
        one_thread = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
        )
        module, fd = "prefect_torch_ddp.rank.fork_server", theirs.fileno()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, by this Python
                [sys.executable, "-m", module, str(fd), str(idle_s())],
                env=os.environ | one_thread,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[fd],
                start_new_session=True,  # a Ctrl-C in the terminal is the caller's business
            )
        self._socket.settimeout(ANSWER_TIMEOUT_S)
        self._lock = threading.Lock()
        self._is_ready = False
        self.is_silent = False
        """Whether it once failed to answer: its ranks may live on, but it forks no more."""

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the server still runs."""
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait until torch is loaded and the self-check has passed.

        Raises:
            ForkServerUnavailableError: the server died, or found itself unfit for forking.
        """
        with self._lock:
            if self._is_ready:
                return
            deadline = time.monotonic() + BOOT_TIMEOUT_S
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            while not poller.poll(ANSWER_TIMEOUT_S * 1000):
                if time.monotonic() > deadline or _stat(self.pid)[0] in "Tt":
                    msg = "the fork server is stopped, or does not get to load torch"
                    raise ForkServerUnavailableError(msg)
            unfit = self._receive().unfit
            if unfit is not None:
                raise ForkServerUnfitError(unfit)
            self._is_ready = True

    def fork(self, files: RankFiles) -> Child:
        """Fork a rank.

        Raises:
            ForkServerUnavailableError: the server is gone, silent or refuses; it won't fork this
                rank later either.
        """
        try:
            with self._lock:
                socket.send_fds(self._socket, [ForkServerOrder("fork").encode()], files.sent())
                answer = self._receive()
        except (OSError, ForkServerUnavailableError) as error:
            # Stopped now, it would carry the order out later, beside the rank started instead.
            self.close()
            raise ForkServerUnavailableError(str(error)) from error
        if answer.unfit:
            raise ForkServerUnavailableError(answer.unfit)
        return Child(answer.pid, partial(self._reap, answer.pid))

    def _reap(self, pid: int) -> int:
        """Return how a dead rank ended; the server reaps only on request."""
        with self._lock:
            if not self.is_silent:
                try:
                    self._socket.send(ForkServerOrder("reap", pid).encode())
                    return self._receive().status
                except (OSError, ForkServerUnavailableError) as error:
                    logger.warning("the fork server can't say how a rank ended: %s", error)
                    self.is_silent = True
        state, parent, *others = _stat(pid)
        if state == "Z" and int(parent) == self.pid:
            return os.waitstatus_to_exitcode(int(others[-1]))
        return -int(signal.SIGKILL)  # it was killed with its server

    def close(self) -> None:
        """End the server with all its ranks."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self) -> ForkServerAnswer:
        try:
            answer = self._socket.recv(65_536)
        except OSError as error:
            msg = f"the fork server did not answer: {error}"
            raise ForkServerUnavailableError(msg) from error
        if not answer:
            msg = f"the fork server ended with status {self._process.wait()}"
            raise ForkServerUnavailableError(msg)
        return ForkServerAnswer.decode(answer)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; X is the state of none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


class ForkClient:
    """The one fork server of a Dask worker, started when first wanted and again after it ended."""

    def __init__(self) -> None:
        """Start with none."""
        self._server: ForkServer | None = None
        self._lock = threading.Lock()
        self._unfit = None if has_pidfd() else "it needs Linux with pidfd_open"

    def warm_up(self) -> ForkServer | None:
        """Start the server unless it runs or can't; doesn't wait for it."""
        with self._lock:
            if self._unfit is not None:
                return None
            if self._server is None or not self._server.is_alive:
                if self._server is not None:
                    self._server.close()
                self._server = ForkServer()
            return self._server

    def ready(self) -> ForkServer | None:
        """Return the server once it is ready; None, with the reason logged, where it can't be.

        Only the holder of the worker's slot asks: no other gang has ranks of this server.
        """
        with self._lock:
            if self._server is not None and self._server.is_silent:
                self._server.close()
        for _ in range(2):  # a server may have ended of idleness just now
            server = self.warm_up()
            if server is None:
                return None
            try:
                server.wait_until_ready()
            except ForkServerUnavailableError as error:
                was_alive = server.is_alive
                self._give_up(server, error)
                if was_alive:
                    return None
            else:
                return server
        return None

    def _give_up(self, server: ForkServer, error: ForkServerUnavailableError) -> None:
        logger.warning("ranks of this worker start as fresh processes, not forked: %s", error)
        with self._lock:
            if isinstance(error, ForkServerUnfitError):
                self._unfit = str(error)
            server.close()
            if self._server is server:
                self._server = None

    def close(self) -> None:
        """End the server."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


_CLIENTS: dict[str, ForkClient] = {}


def fork_client(worker: str) -> ForkClient:
    """Return the fork client of the Dask worker at this address, which lives in this process."""
    return _CLIENTS.setdefault(worker, ForkClient())


class CloseForkServer(WorkerPlugin):
    """Ends a Dask worker's fork server with it; a killed worker's closed socket does the same."""

    name = "prefect-torch-ddp-fork-server"

    async def teardown(self, worker: Worker) -> None:
        """End the server with all its ranks, once those that listen have stopped."""
        deadline_s = time.monotonic() + AGENT_LIMIT_S
        # Its agent, in another thread, sees that the worker closes and ends itself.
        while SLOTS.occupant(worker.address) is not None and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        client = _CLIENTS.pop(worker.address, None)
        if client is not None:
            client.close()
