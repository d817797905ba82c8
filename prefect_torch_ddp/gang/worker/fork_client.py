"""The Dask worker's side of its fork server, which has torch loaded and forks ranks quickly."""

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

from distributed import Worker, WorkerPlugin

from prefect_torch_ddp.errors import ForkServerUnavailableError, ForkServerUnfitError
from prefect_torch_ddp.gang.liveness import CALLERS
from prefect_torch_ddp.gang.worker.child import Child, has_pidfd, without_workers_own
from prefect_torch_ddp.gang.worker.mailbox import is_polled
from prefect_torch_ddp.gang.worker.slots import SLOTS
from prefect_torch_ddp.protocol.rank import ForkServerAnswer, ForkServerOrder, Preload, RankFiles

logger = logging.getLogger(__name__)

IDLE_S = 1800.0
"""A server without ranks ends after this long; the next gang starts a new one."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Thread pools would start while libraries load; a process with threads can't fork."""
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Memory in pages of 2 MiB if the kernel leaves that to programs: to fork a process with torch,
and to end it, takes two thirds of the time. (glibc's manual, Memory Allocation Tunables.)"""
BOOT_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 5.0
"""A server that doesn't answer an order for this long is stopped or starved: it is given up."""
WITH_RANKS_TIMEOUT_S = 60.0
"""A server that has ranks is given up later: they end with it, and so does their attempt."""
AGENT_LIMIT_S = 300.0
"""The longest that a closing worker waits for its agent; its nanny may kill it sooner, and
`stop_grace_s` mostly ends it before."""


class ForkServer:
    """A running fork server and the socket to it. Safe between threads."""

    def __init__(self, process: Child, connection: socket.socket) -> None:
        """Take a process that loads torch; see `wait_until_ready`."""
        self._process, self._socket = process, connection
        self._socket.settimeout(ANSWER_TIMEOUT_S)
        self._lock = threading.Lock()
        self._is_ready = False
        self._unreaped = set[int]()
        """Its ranks of which nobody has asked yet how they ended."""
        self.libraries: list[str] = []
        """What else it has loaded."""
        self.is_silent = False
        """Whether it once failed to answer: its ranks may live on, but it forks no more."""

    @classmethod
    def start(cls) -> Self:
        """Start one with only torch."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        module, fd = "prefect_torch_ddp.rank.process.fork_server", theirs.fileno()
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own module, by this Python
                [sys.executable, "-m", module, str(fd), str(IDLE_S)],
                env=LARGE_PAGES | without_workers_own(os.environ) | ONE_THREAD,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[fd],
                start_new_session=True,  # a Ctrl-C in the terminal is the caller's business
            )
        return cls(Child(process.pid, process.wait), ours)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the server still runs."""
        return not self._process.is_dead

    def wait_until_ready(self) -> None:
        """Wait until all is loaded; raises ForkServerUnavailableError, also if it is unfit."""
        with self._lock:
            if self._is_ready:
                return
            self._wait_until_loaded()
            self._is_ready = True

    def load(self, library: str) -> None:
        """Have it import a library; then it must be given up if that fails.

        Raises:
            ForkServerUnfitError: the library's import fails, ends the server or makes it unfit.
            ForkServerUnavailableError: it was killed, or took too long: no fault of the library
                is proved.
            OSError: it was gone already.
        """
        with self._lock:
            self._socket.send(ForkServerOrder("load", library=library).encode())
            try:
                self._wait_until_loaded()
            except ForkServerUnavailableError as error:
                if self._process.is_dead and self._process.reap() >= 0:
                    raise ForkServerUnfitError(str(error)) from error
                raise
            self.libraries.append(library)

    def _wait_until_loaded(self) -> None:
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLIN)
        except ValueError as error:  # its worker is closing, and has closed it
            msg = "the fork server was ended"
            raise ForkServerUnavailableError(msg) from error
        if not poller.poll(BOOT_TIMEOUT_S * 1000):
            msg = f"the fork server has loaded for {BOOT_TIMEOUT_S:g} s and is not done"
            raise ForkServerUnavailableError(msg)
        answer = self._receive()
        if answer.unfit is not None:
            raise ForkServerUnfitError(answer.unfit)

    def fork(self, files: RankFiles) -> Child:
        """Fork a rank.

        Raises:
            ForkServerUnavailableError: it can't, and won't fork this rank later either.
            OSError: nor does it answer any more, and the ranks that it had forked end with it.
        """
        return self._fork(ForkServerOrder("fork"), files.sent())

    def _fork(self, order: ForkServerOrder, fds: Sequence[int]) -> Child:
        try:
            with self._lock:
                self._socket.settimeout(
                    WITH_RANKS_TIMEOUT_S if self._unreaped else ANSWER_TIMEOUT_S
                )
                socket.send_fds(self._socket, [order.encode()], fds)
                answer = self._receive()
        except (OSError, ForkServerUnavailableError) as error:
            had_ranks = bool(self._unreaped)
            # Stopped now, it would carry the order out later, next to the rank started instead.
            self.close()
            if had_ranks:
                msg = f"{error}; the ranks of this worker that it had started ended with it"
                raise OSError(msg) from error
            raise ForkServerUnavailableError(str(error)) from error
        if answer.unfit:
            raise ForkServerUnavailableError(answer.unfit)
        self._unreaped.add(answer.pid)
        return Child(answer.pid, partial(self._reap, answer.pid))

    def _reap(self, pid: int) -> int:
        """Return how a dead rank ended; the server reaps only on request."""
        with self._lock:
            self._unreaped.discard(pid)
            if not self.is_silent:
                try:
                    self._socket.settimeout(ANSWER_TIMEOUT_S)
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
        self._process.reap()
        self._process.close()

    def _receive(self) -> ForkServerAnswer:
        try:
            answer = self._socket.recv(65_536)
        except OSError as error:
            msg = f"the fork server did not answer: {error}"
            raise ForkServerUnavailableError(msg) from error
        if not answer:
            msg = f"the fork server ended with status {self._process.reap()}"
            raise ForkServerUnavailableError(msg)
        return ForkServerAnswer.decode(answer)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; X is the state of none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


class ForkClient:
    """The fork server of a Dask worker.

    Another takes its place for a gang that must not have a library which another gang named.
    """

    def __init__(self, worker: str) -> None:
        """Start with none."""
        self._worker = worker
        self._server: ForkServer | None = None
        self._lock = threading.RLock()
        self._taking = threading.Lock()
        """Held to take or give up the server: a closing worker doesn't wait until it has loaded."""
        self._unfit = None if has_pidfd() else "it needs Linux with pidfd_open"
        self._left_to_ranks: set[str] = set()
        """Libraries that make a server unfit."""
        self._left_by_gang: set[str] = set()
        """Those that failed for another reason, which the next gang tries again."""
        self._notes: dict[str, str] = {}

    def warm_up(self, preload: Preload) -> None:
        """Get the server ready in a thread, unless a gang has the worker: it is left in peace."""

        def warm() -> None:
            with self._lock, contextlib.suppress(OSError):  # its gang will say so
                if SLOTS.occupant(self._worker) is None:
                    self.ready(preload)

        threading.Thread(target=warm, name="prefect-torch-ddp-warm", daemon=True).start()

    def begin_gang(self) -> None:
        """Try again for the next gang what failed for lack of memory or time."""
        self._left_by_gang = set()  # without the lock, which one that loads may hold for long

    def take_notes(self, preload: Preload) -> list[str]:
        """Return what the log of a gang should say of its libraries, and forget that."""
        return [self._notes.pop(name) for name in preload.libraries if name in self._notes]

    def ready(self, preload: Preload) -> ForkServer | None:
        """Return a server once it is ready; None, with the reason logged, if it can't be.

        Only the holder of the worker's slot asks: no other gang has ranks of these servers.
        """
        with self._lock:
            while True:
                server = self._ready()
                if server is None or self._has_libraries(server, preload):
                    return server
                self.close()

    def _ready(self) -> ForkServer | None:
        server = self._server
        if server is not None and (server.is_silent or not server.is_alive):
            self.close()
        with self._taking:
            if self._unfit is not None:
                return None
            server = self._server = self._server or ForkServer.start()
        try:
            server.wait_until_ready()
        except ForkServerUnavailableError as error:
            is_closing = self._unfit is not None
            text = "ranks of this worker start as fresh processes, not forked: %s"
            logger.log(logging.DEBUG if is_closing else logging.WARNING, text, error)
            if isinstance(error, ForkServerUnfitError):
                self._unfit = str(error)
            self.close()
            return None
        return server

    def _has_libraries(self, server: ForkServer, preload: Preload) -> bool:
        """Have a server load what it lacks; False if it has to be replaced."""
        if not all(map(preload.allows, server.libraries)):
            return False
        known = {*server.libraries, *self._left_to_ranks, *self._left_by_gang}
        for name in (name for name in preload.libraries if name not in known):
            try:
                server.load(name)
            except (OSError, ForkServerUnavailableError) as error:
                is_at_fault = isinstance(error, ForkServerUnfitError)
                (self._left_to_ranks if is_at_fault else self._left_by_gang).add(name)
                self._notes[name] = f"loaded in each rank and not in advance: {name} ({error})"
                logger.info("%s", self._notes[name])
                return False
        return True

    def end(self) -> None:
        """End the server for good."""
        with self._taking:
            self._unfit = "its worker is closing"
        self.close()

    def close(self) -> None:
        """End the server, once if two threads ask for it: its descriptors may be others' then."""
        with self._taking:
            server, self._server = self._server, None
        if server is not None:
            server.close()


_CLIENTS: dict[str, ForkClient] = {}


def fork_client(worker: str) -> ForkClient:
    """Return the fork client of the Dask worker at this address, which lives in this process."""
    return _CLIENTS.setdefault(worker, ForkClient(worker))


class CloseForkServer(WorkerPlugin):
    """Ends a Dask worker's fork server with it; a killed worker's closed socket does the same."""

    name = "prefect-torch-ddp-fork-server"

    async def teardown(self, worker: Worker) -> None:
        """End the server with all its ranks, once those that listen have stopped."""
        deadline_s = time.monotonic() + AGENT_LIMIT_S
        # Its agent, in another thread, sees that the worker closes and ends itself; so does the
        # caller of a gang, which needs its client until that gang has stopped. How ranks have
        # ended is heard of only here: a caller that misses it can't tell a save from a loss.
        address = worker.address
        while SLOTS.occupant(address) or CALLERS[address] or is_polled():
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.05)
        client = _CLIENTS.pop(worker.address, None)
        if client is not None:
            client.end()
