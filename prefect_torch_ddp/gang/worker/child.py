"""Owns how a rank's process starts and is reaped: behind this seam a fresh process and a fork
of the rank host are alike.

Owns the environment a rank starts with: its Dask worker's own, plus torchrun's contract. Pure.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol

from prefect_torch_ddp.protocol.rank import RankFiles, RankLaunch

HAS_PIDFD = hasattr(os, "pidfd_open")


class Child(Protocol):
    """A started rank process, in a session of its own."""

    @property
    def pid(self) -> int:
        """The process id, also that of its session."""
        ...

    @property
    def death_fd(self) -> int | None:
        """A file descriptor that becomes readable when it ends, where the system has such."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether it has ended, reaped or not."""
        ...

    def reap(self) -> int:
        """Wait for its end; return the exit code, or the negated number of the signal that
        killed it.
        """
        ...

    def close(self) -> None:
        """Close what was opened to watch it."""
        ...


class ExecChild:
    """A fresh Python process: works everywhere, and pays for importing torch."""

    def __init__(self, files: RankFiles, environment: dict[str, str]) -> None:
        """Start it; raises OSError where that fails."""
        passed = files.own() + (() if files.store is None else (files.store,))
        self._popen = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "prefect_torch_ddp.rank",
                *map(str, files.own()),
                str(os.getpid()),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=files.stdout,
            stderr=files.stderr,
            pass_fds=passed,
            start_new_session=True,
        )
        self.death_fd: int | None = os.pidfd_open(self._popen.pid) if HAS_PIDFD else None

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    @property
    def is_dead(self) -> bool:
        """Whether it has ended."""
        if self._popen.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def reap(self) -> int:
        """Wait for its end."""
        return self._popen.wait()

    def close(self) -> None:
        """Close the pidfd."""
        if self.death_fd is not None:
            os.close(self.death_fd)
            self.death_fd = None


def kill_session(pid: int) -> None:
    """Kill a process that leads a session of its own, and all that stayed in its process
    group.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def wait_for_death(death_fd: int, timeout_s: float) -> bool:
    """Wait until the process behind a pidfd has ended, at most so long."""
    poller = select.poll()
    poller.register(death_fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


# Names and meaning: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables


def rank_environment(worker_environment: Mapping[str, str], launch: RankLaunch) -> dict[str, str]:
    """Return the rank's environment; the worker's is not changed.

    TORCHELASTIC_USE_AGENT_STORE is taken out: in the user mode rank 0 must listen at
    MASTER_PORT itself.
    """
    place, shape = launch.place, launch.shape
    contract = {
        "RANK": place.rank,
        "WORLD_SIZE": shape.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": shape.local_world_sizes[place.node_rank],
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": shape.num_nodes,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": shape.world_size,
        "MASTER_ADDR": launch.master_addr,
        "MASTER_PORT": launch.master_port,
        "TORCHELASTIC_RUN_ID": launch.gang_id,
        "TORCHELASTIC_RESTART_COUNT": launch.attempt - 1,
        "TORCHELASTIC_MAX_RESTARTS": launch.max_restarts,
    }
    environment = dict(worker_environment) | {name: str(value) for name, value in contract.items()}
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return environment
