"""Owns the Dask worker's end of its rank host: one warm helper process that has torch loaded and forks ranks in milliseconds."""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from typing import Any

from distributed import Worker, WorkerPlugin

from prefect_torch_ddp.gang.child import HAS_PIDFD, RankFiles, wait_for_death

logger = logging.getLogger(__name__)

BOOT_TIMEOUT_S = 120.0
IDLE_S = 1800.0
"""A host without ranks ends after so long; the next gang starts a new one."""
ANSWER_TIMEOUT_S = 30.0


class HostUnavailableError(Exception):
    """Ranks can't be forked here; the text says why."""


class RankHost:
    """A running host process and the socket to it. Safe between threads."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        """Start the process; it loads torch meanwhile, see `wait_until_ready`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # While numpy and torch load, each thread pool would start its threads, and a process with threads can't be forked.
            environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
            self._process = subprocess.Popen(  # noqa: S603 - our own module, by this Python
                [sys.executable, "-m", "prefect_torch_ddp.rank.host", str(theirs.fileno()), str(idle_s)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C in the terminal is the caller's business
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._ready = False

    @property
    def pid(self) -> int:
        """The host's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the host still runs."""
        return self._process.poll() is None

    def wait_until_ready(self) -> None:
        """Wait until torch is loaded and the self-check has passed.

        Raises:
            HostUnavailableError: the host died, or found itself unfit for forking.
        """
        with self._lock:
            if self._ready:
                return
            verdict = self._receive(BOOT_TIMEOUT_S)
            if verdict["unfit"] is not None:
                raise HostUnavailableError(verdict["unfit"])
            self._ready = True

    def fork(self, files: RankFiles) -> "ForkedChild":
        """Fork a rank.

        Raises:
            HostUnavailableError: the host is gone or refuses.
        """
        sent = [*files.own(), files.stdout, files.stderr, *([] if files.store is None else [files.store])]
        with self._lock:
            try:
                socket.send_fds(self._socket, [json.dumps({"op": "fork"}).encode()], sent)
            except OSError as error:
                raise HostUnavailableError(str(error)) from error
            answer = self._receive(ANSWER_TIMEOUT_S)
        return ForkedChild(self, answer["pid"])

    def reap(self, pid: int) -> int:
        """Return how a dead rank ended; one whose host died before was killed with it."""
        with self._lock:
            try:
                self._socket.send(json.dumps({"op": "reap", "pid": pid}).encode())
                status: int = self._receive(ANSWER_TIMEOUT_S)["status"]
            except (OSError, HostUnavailableError):
                return -9
        return status

    def close(self) -> None:
        """End the host with all its ranks."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._socket.settimeout(timeout_s)
        try:
            answer = self._socket.recv(65_536)
        except OSError as error:
            msg = f"the rank host did not answer: {error}"
            raise HostUnavailableError(msg) from error
        if not answer:
            msg = f"the rank host ended with status {self._process.wait()}"
            raise HostUnavailableError(msg)
        message: dict[str, Any] = json.loads(answer)
        return message


class ForkedChild:
    """A rank that the host forked: not our child, so its death shows by its pidfd and its status is the host's to tell."""

    def __init__(self, host: RankHost, pid: int) -> None:
        """Take over a rank that the host has just forked; the host reaps nothing unasked, so the number is its own."""
        self._host = host
        self._status: int | None = None
        self.pid = pid
        self.death_fd: int | None = os.pidfd_open(pid)

    @property
    def is_dead(self) -> bool:
        """Whether it has ended."""
        return self._status is not None or (self.death_fd is not None and wait_for_death(self.death_fd, 0))

    def reap(self) -> int:
        """Wait for its end."""
        if self._status is None:
            if self.death_fd is not None:
                wait_for_death(self.death_fd, ANSWER_TIMEOUT_S)
            self._status = self._host.reap(self.pid)
        return self._status

    def close(self) -> None:
        """Close the pidfd."""
        if self.death_fd is not None:
            os.close(self.death_fd)
            self.death_fd = None


class WorkersHost:
    """The one host of a Dask worker, started when first wanted and again after it ended."""

    def __init__(self) -> None:
        """Start with none."""
        self._host: RankHost | None = None
        self._lock = threading.Lock()
        self._unfit: str | None = None if HAS_PIDFD and sys.platform == "linux" else "it needs Linux with pidfd_open"

    def warm_up(self) -> RankHost | None:
        """Start the host unless it runs or can't; doesn't wait for it."""
        with self._lock:
            if self._unfit is not None:
                return None
            if self._host is None or not self._host.is_alive:
                if self._host is not None:
                    self._host.close()
                self._host = RankHost()
            return self._host

    def ready(self) -> RankHost | None:
        """Return the host once it is ready; None, with the reason logged once, where ranks must be fresh processes."""
        for _ in range(2):  # a host may have ended of idleness just now
            host = self.warm_up()
            if host is None:
                return None
            try:
                host.wait_until_ready()
            except HostUnavailableError as error:
                self._give_up(host, str(error), for_good=host.is_alive)
            else:
                return host
        return None

    def _give_up(self, host: RankHost, why: str, *, for_good: bool) -> None:
        logger.warning("ranks of this worker start as fresh processes, since the rank host can't fork them: %s", why)
        with self._lock:
            if for_good:
                self._unfit = why
            host.close()
            if self._host is host:
                self._host = None

    def close(self) -> None:
        """End the host."""
        with self._lock:
            if self._host is not None:
                with contextlib.suppress(OSError):
                    self._host.close()
                self._host = None


_HOSTS: dict[str, WorkersHost] = {}


def host_of(worker: str) -> WorkersHost:
    """Return the host of the Dask worker at this address, which lives in this process."""
    return _HOSTS.setdefault(worker, WorkersHost())


class EndRankHost(WorkerPlugin):
    """Ends a Dask worker's rank host when the worker closes; one that is killed closes the host's socket, which ends it too."""

    name = "prefect-torch-ddp-rank-host"

    def teardown(self, worker: Worker) -> None:
        """End the host with all its ranks."""
        host = _HOSTS.pop(worker.address, None)
        if host is not None:
            host.close()
