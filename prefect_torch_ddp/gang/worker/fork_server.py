"""Owns one rank host process as its Dask worker sees it: its start, the orders it takes, the
ranks it forked.
"""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import dask

from prefect_torch_ddp.errors import HostUnavailableError, HostUnfitError
from prefect_torch_ddp.gang.worker.child import wait_for_death
from prefect_torch_ddp.protocol.fork_server import ForkServerAnswer, ForkServerOrder
from prefect_torch_ddp.protocol.rank import RankFiles

logger = logging.getLogger(__name__)

BOOT_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 5.0
"""A host that doesn't answer an order for so long is stopped, or starved: it is given up."""
IDLE_S = 1800.0
"""A host without ranks ends after so long; the next gang starts a new one."""
IDLE_SETTING = "prefect-torch-ddp.rank-host.idle-s"
"""The setting in Dask's configuration that changes it, on the worker."""


def idle_s() -> float:
    """Return how many seconds a host of this Dask worker may live without ranks."""
    value = dask.config.get(IDLE_SETTING, default=IDLE_S)
    try:
        if (seconds := float(value)) > 0:
            return seconds
    except (TypeError, ValueError):
        pass
    logger.warning(
        "%s is %r and must be a positive number of seconds; it is taken for %g",
        IDLE_SETTING,
        value,
        IDLE_S,
    )
    return IDLE_S


class RankHost:
    """A running host process and the socket to it. Safe between threads."""

    def __init__(self) -> None:
        """Start the process; it loads torch meanwhile, see `wait_until_ready`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # While numpy and torch load, each thread pool would start its threads, and a
            # process with threads can't be forked.
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
            }
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "prefect_torch_ddp.rank.fork_server",
                    str(theirs.fileno()),
                    str(idle_s()),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C in the terminal is the caller's business
            )
        self._socket = ours
        self._socket.settimeout(ANSWER_TIMEOUT_S)
        self._lock = threading.Lock()
        self._ready = False
        self.is_silent = False
        """Whether it owed an answer once: it may have ranks that live on, and forks no further
        ones."""

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
            deadline = time.monotonic() + BOOT_TIMEOUT_S
            while not self._has_answer():
                if time.monotonic() > deadline or _stat(self.pid)[0] in "Tt":
                    msg = "the rank host is stopped, or does not get to load torch"
                    raise HostUnavailableError(msg)
            ready = self._receive()
            if ready.unfit is not None:
                raise HostUnfitError(ready.unfit)
            self._ready = True

    def fork(self, files: RankFiles) -> "ForkedChild":
        """Fork a rank.

        Raises:
            HostUnavailableError: the host is gone, silent or refuses; it will not fork this
                rank later either.
        """
        try:
            with self._lock:
                socket.send_fds(self._socket, [ForkServerOrder("fork").encode()], files.sent())
                answer = self._receive()
        except (OSError, HostUnavailableError) as error:
            self.close()  # stopped, it would carry the order out when it goes on, beside the rank that starts instead
            raise HostUnavailableError(str(error)) from error
        if answer.unfit:
            raise HostUnavailableError(answer.unfit)
        return ForkedChild(self, answer.pid)

    def reap(self, pid: int) -> int:
        """Return how a dead rank ended; one whose host died before was killed with it."""
        with self._lock:
            if not self.is_silent:
                try:
                    self._socket.send(ForkServerOrder("reap", pid).encode())
                    status = self._receive().status
                except (OSError, HostUnavailableError) as error:
                    logger.warning("a rank's end is not told by the rank host: %s", error)
                    self.is_silent = True
                else:
                    return status
        return _status_of_zombie(pid, self.pid)

    def close(self) -> None:
        """End the host with all its ranks."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _has_answer(self) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(ANSWER_TIMEOUT_S * 1000))

    def _receive(self) -> ForkServerAnswer:
        try:
            answer = self._socket.recv(65_536)
        except OSError as error:
            msg = f"the rank host did not answer: {error}"
            raise HostUnavailableError(msg) from error
        if not answer:
            msg = f"the rank host ended with status {self._process.wait()}"
            raise HostUnavailableError(msg)
        return ForkServerAnswer.decode(answer)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; a process that is gone has the
    state X.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _status_of_zombie(pid: int, host_pid: int) -> int:
    """Return the status of a dead rank that its host doesn't reap; without a host it was killed
    too.
    """
    state, parent, *others = _stat(pid)
    return (
        os.waitstatus_to_exitcode(int(others[-1]))
        if state == "Z" and int(parent) == host_pid
        else -int(signal.SIGKILL)
    )


class ForkedChild:
    """A rank that the host forked: not our child, so its death shows by its pidfd and its
    status is the host's to tell.
    """

    def __init__(self, host: RankHost, pid: int) -> None:
        """Take over a rank that the host has just forked; the host reaps nothing unasked, so
        the number is its own.
        """
        self._host = host
        self._status: int | None = None
        self.pid = pid
        self.death_fd: int | None = os.pidfd_open(pid)

    @property
    def is_dead(self) -> bool:
        """Whether it has ended."""
        return self._status is not None or (
            self.death_fd is not None and wait_for_death(self.death_fd, 0)
        )

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
