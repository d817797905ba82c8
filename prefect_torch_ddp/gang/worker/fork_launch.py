"""The launch of a fork server's process, which a local cluster's workers begin with.

Such a worker is spawned with this module as its main one, before it imports Dask: torch, whose
loading a first gang waits for, then loads half a second sooner.
"""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module

from prefect_torch_ddp.gang.worker.child import has_pidfd, without_workers_own

IDLE_S = 1800.0
"""A server without ranks ends after this long; the next gang starts a new one."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Thread pools would start while libraries load; a process with threads can't fork."""
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Memory in pages of 2 MiB where the kernel leaves that to programs: to fork a process with torch,
and to end it, takes two thirds of the time. (glibc's manual, Memory Allocation Tunables.)"""


@dataclass(frozen=True)
class Launched:
    """A process that loads torch, this end of its socket, and the environment that it has."""

    process: "subprocess.Popen[bytes]"
    connection: socket.socket
    environment: dict[str, str]


_ahead: list[Launched] = []


def launch() -> Launched:
    """Return a fork server's process: the one launched ahead, if the environment is still its."""
    environment = _environment()
    if _ahead:
        ahead = _ahead.pop()
        if ahead.environment == environment and ahead.process.poll() is None:
            return ahead
        ahead.connection.close()
        ahead.process.kill()
        ahead.process.wait()
    return _launch(environment)


def launch_ahead() -> None:
    """Launch it now, in the main thread of a new process, before anybody asks for it.

    Nothing is lost where that fails: who asks for one is told.
    """
    if has_pidfd():  # else ranks aren't forked
        with suppress(OSError):
            _ahead.append(_launch(_environment(), str(os.getpid())))


def _environment() -> dict[str, str]:
    return LARGE_PAGES | without_workers_own(os.environ) | ONE_THREAD


def _launch(environment: dict[str, str], *parent: str) -> Launched:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    module, fd = "prefect_torch_ddp.rank.fork_server", theirs.fileno()
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - our own module, by this Python
            [sys.executable, "-m", module, str(fd), str(IDLE_S), *parent],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[fd],
            start_new_session=True,  # a Ctrl-C in the terminal is the caller's business
        )
    return Launched(process, ours, environment)


if __name__ == "__mp_main__":  # as multiprocessing runs it in a process that it has spawned
    # Under its own name it is another module, which the fork client takes the process from.
    import_module("prefect_torch_ddp.gang.worker.fork_launch").launch_ahead()
    # What this process spawns in its turn is no Dask worker.
    globals().update(__spec__=None, __file__=None)
