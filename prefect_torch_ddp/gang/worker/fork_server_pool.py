"""Owns the one rank host of a Dask worker: a warm helper process that has torch loaded and
forks ranks in milliseconds.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import time

from distributed import Worker, WorkerPlugin

from prefect_torch_ddp.errors import HostUnavailableError, HostUnfitError
from prefect_torch_ddp.gang.worker.child import HAS_PIDFD
from prefect_torch_ddp.gang.worker.fork_server import RankHost
from prefect_torch_ddp.gang.worker.slots import SLOTS

AGENT_LIMIT_S = 30.0
"""How long a worker that closes waits for its agent at most; its nanny may be quicker to kill
it."""

logger = logging.getLogger(__name__)


class WorkersHost:
    """The one host of a Dask worker, started when first wanted and again after it ended."""

    def __init__(self) -> None:
        """Start with none."""
        self._host: RankHost | None = None
        self._lock = threading.Lock()
        self._unfit: str | None = (
            None if HAS_PIDFD and sys.platform == "linux" else "it needs Linux with pidfd_open"
        )

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
        """Return the host once it is ready; None, with the reason logged, where ranks must be
        fresh processes.

        Only the holder of the worker's slot asks: no other gang has ranks of this host.
        """
        with self._lock:
            if self._host is not None and self._host.is_silent:
                self._host.close()
        for _ in range(2):  # a host may have ended of idleness just now
            host = self.warm_up()
            if host is None:
                return None
            try:
                host.wait_until_ready()
            except HostUnavailableError as error:
                was_alive = host.is_alive
                self._give_up(host, error)
                if was_alive:
                    return None
            else:
                return host
        return None

    def _give_up(self, host: RankHost, error: HostUnavailableError) -> None:
        logger.warning(
            "ranks of this worker start as fresh processes, since the rank host can't fork them: %s",
            error,
        )
        with self._lock:
            if isinstance(error, HostUnfitError):
                self._unfit = str(error)
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
    """Ends a Dask worker's rank host when the worker closes; one that is killed closes the
    host's socket, which ends it too.
    """

    name = "prefect-torch-ddp-rank-host"

    async def teardown(self, worker: Worker) -> None:
        """End the host with all its ranks, once those that listen have stopped."""
        deadline_s = time.monotonic() + AGENT_LIMIT_S
        # Its agent sees that the worker closes, and ends itself, in its thread.
        while SLOTS.occupant(worker.address) is not None and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        host = _HOSTS.pop(worker.address, None)
        if host is not None:
            host.close()
