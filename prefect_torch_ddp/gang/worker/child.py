"""A rank's process at the system's level: its start as a fresh Python, its status, its death."""

import contextlib
import functools
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping

from prefect_torch_ddp.protocol.rank import RankFiles, RankLaunch

DEATH_TIMEOUT_S = 5.0
"""How long a killed process may take to be dead."""


@functools.cache
def has_pidfd() -> bool:
    """Tell whether this kernel and sandbox let us open pidfds; asked once, by opening one."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


class Child:
    """A started rank process, fresh or forked, which leads its own session."""

    def __init__(self, pid: int, reap: Callable[[], int]) -> None:
        """Watch a process that nobody reaps but this object."""
        self.pid = pid
        self.death_fd = os.pidfd_open(pid) if has_pidfd() else None
        """Becomes readable when the process ends; None if the system has no such thing."""
        self._reap = reap
        self._status: int | None = None

    @property
    def is_reaped(self) -> bool:
        """Whether the process is gone and its status known."""
        return self._status is not None

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, reaped or not."""
        if self.is_reaped:
            return True
        if self.death_fd is not None:
            return _is_readable(self.death_fd, 0)
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.pid, options) is not None

    def reap(self) -> int:
        """Wait for the end; return the exit code, or the negated number of the signal."""
        if self._status is None:
            if self.death_fd is not None:
                _is_readable(self.death_fd, DEATH_TIMEOUT_S)
            self._status = self._reap()
        return self._status

    def kill(self) -> None:
        """Kill the process, and everything that stayed in its process group."""
        if not self.is_reaped:  # from then on the number may be another group's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pidfd."""
        if self.death_fd is not None:
            os.close(self.death_fd)
            self.death_fd = None


def _is_readable(fd: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def start_fresh(files: RankFiles, environment: dict[str, str]) -> Child:
    """Start a rank as a fresh Python: works everywhere, and pays for importing torch.

    Raises:
        OSError: the process can't be started.
    """
    own = [str(fd) for fd in files.own()]
    process = subprocess.Popen(  # noqa: S603 - our own module, by this Python
        [sys.executable, "-m", "prefect_torch_ddp.rank.process.main", *own, str(os.getpid())],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=files.stdout,
        stderr=files.stderr,
        pass_fds=files.own() + (() if files.store is None else (files.store,)),
        start_new_session=True,
    )
    return Child(process.pid, process.wait)


# https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
CONTRACT: dict[str, Callable[[RankLaunch], object]] = {
    "RANK": lambda launch: launch.place.rank,
    "WORLD_SIZE": lambda launch: launch.shape.world_size,
    "LOCAL_RANK": lambda launch: launch.place.local_rank,
    "LOCAL_WORLD_SIZE": lambda launch: launch.shape.local_world_sizes[launch.place.node_rank],
    "GROUP_RANK": lambda launch: launch.place.node_rank,
    "GROUP_WORLD_SIZE": lambda launch: launch.shape.num_nodes,
    "ROLE_RANK": lambda launch: launch.place.rank,
    "ROLE_WORLD_SIZE": lambda launch: launch.shape.world_size,
    "MASTER_ADDR": lambda launch: launch.master_addr,
    "MASTER_PORT": lambda launch: launch.master_port,
    "TORCHELASTIC_RUN_ID": lambda launch: launch.gang_id,
    "TORCHELASTIC_RESTART_COUNT": lambda launch: launch.attempt - 1,
    "TORCHELASTIC_MAX_RESTARTS": lambda launch: launch.max_restarts,
}
"""The environment that torchrun gives each rank."""


PREFECTS = re.compile(
    r"PREFECT_\w*(KEY|AUTH_STRING|(CONNECTION|DOCKET|MESSAGING)_URL|PASSWORD|CUSTOM_HEADERS)",
    re.IGNORECASE,
)
"""Prefect's own credentials. A Dask worker needs them, its ranks don't: they load no Prefect."""


NANNYS = ("MALLOC_TRIM_THRESHOLD_", "65536")
"""With this, which Dask's nannies set for workers, each step of a training gets its large tensors'
memory from the kernel again, and takes a quarter longer on a CPU. Another value is the user's."""


def without_workers_own(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without Prefect's credentials and the nanny's malloc. Pure."""
    return {
        name: value
        for name, value in environment.items()
        if not PREFECTS.fullmatch(name) and (name, value) != NANNYS
    }


def rank_environment(worker_environment: Mapping[str, str], launch: RankLaunch) -> dict[str, str]:
    """Return the environment of a rank: its Dask worker's, with torchrun's contract. Pure."""
    environment = without_workers_own(worker_environment)
    environment |= {name: str(value_of(launch)) for name, value_of in CONTRACT.items()}
    if launch.place.visible_devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = launch.place.visible_devices
    # In the user mode rank 0 must listen at MASTER_PORT itself.
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return environment
