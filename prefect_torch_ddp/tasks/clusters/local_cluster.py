"""The local Dask cluster that a run makes for itself: quiet, so that its cores are the ranks'."""

import asyncio
import contextlib
import functools
import logging
import os
import pickle
import socket
import sys
import time
from typing import Any

import cloudpickle
import dask
import distributed
from dask.system import CPU_COUNT
from distributed.core import Status
from distributed.deploy.spec import ProcessInterface

from prefect_torch_ddp.gang.liveness import liveness_timeout_s
from prefect_torch_ddp.gang.warm import PRELOAD
from prefect_torch_ddp.gang.worker import nanny
from prefect_torch_ddp.lazy import exported_by
from prefect_torch_ddp.tasks.clusters.dask_log import log_level, quiet_dask

HEARTBEAT_S = 5.0
"""How often a worker tells the scheduler of itself. Dask's own twice a second take 7 ms of a core
in each second, which two ranks that fill two cores wait for."""
CLOSE_S = 30.0
"""How long a nanny may take to close its worker; it kills it after some 5 s itself."""
FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0
"""How long to wait after a worker that did not start: twice as long each time, up to this."""
NEVER_S = 1e9
LOCKS = {
    "distributed.scheduler.locks.lease-timeout": "10s",
    "distributed.scheduler.locks.lease-validation-interval": "2s",
}
"""After how long the lock of a killed worker is free again, which its replacement waits for: Dask's
own are 30 s and 10 s."""

logger = logging.getLogger(__name__)


class NannyProcess(ProcessInterface):
    """A worker of the cluster: its nanny has its own process, see `gang/worker/nanny.py`.

    Why not Dask's SubprocessCluster: there the scheduler is a process too, so distributed is
    imported once more; a worker's options are on its command line, which every user of the machine
    can read; and a nanny that is killed isn't started again.
    """

    def __init__(self, scheduler: str, **options: Any) -> None:
        """Keep what to start; Dask's options of a nanny."""
        super().__init__()
        given = cloudpickle.dumps((dask.config.config, scheduler, options))
        self._given = pickle.dumps(sys.path) + given
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Start it, and return once its worker runs; raises RuntimeError if it doesn't."""
        self._starting = asyncio.current_task()
        await self._start()
        self._starting = None
        await super().start()
        self._watch = asyncio.create_task(self._replace_killed())

    async def _start(self) -> None:
        if self._writer is not None:
            self._writer.close()  # of the one that was killed
        ours, theirs = socket.socketpair()
        # In its own session: a Ctrl-C in the terminal is meant for the flow, which closes it.
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", nanny.__name__, str(theirs.fileno())),
                    env={nanny.LOG_LEVEL: log_level(), **os.environ},
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(self._given)
        answer = await reader.readline()
        if answer != b"\n":
            await self._process.wait()
            what = answer.decode(errors="replace") or "its nanny's process ended"
            msg = f"a worker of the local Dask cluster did not start: {what}"
            raise RuntimeError(msg)

    async def _replace_killed(self) -> None:
        """Start another when the nanny's process was killed, by the kernel for instance."""
        assert self._process is not None
        pause_s = FIRST_PAUSE_S
        while await self._process.wait() != 0:
            try:
                await self._start()
                pause_s = FIRST_PAUSE_S
            except (OSError, RuntimeError) as error:
                # Too little memory or too many processes, perhaps only for now.
                words = "a killed worker could not be replaced, next try in %g s: %s"
                logger.warning(words, pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def close(self) -> None:
        """Close it, gracefully if it can, also if it still starts."""
        if self.status in (Status.closing, Status.closed):
            await self.finished()
            return
        self.status = Status.closing
        try:
            await self._end()
        except asyncio.CancelledError:  # by a second Ctrl-C
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            raise
        finally:
            await super().close()

    async def _end(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None:
            with contextlib.suppress(OSError):
                await self._order_close(self._process)
            try:
                await asyncio.wait_for(self._process.wait(), CLOSE_S)
            except TimeoutError:
                self._process.kill()  # its worker watches it, and ends
                await self._process.wait()
        if self._writer is not None:
            self._writer.close()

    async def _order_close(self, process: asyncio.subprocess.Process) -> None:
        if self._writer is None:  # it doesn't know yet what to start
            process.kill()
            return
        self._writer.write(nanny.CLOSE)
        if self._starting is not None:
            self._writer.write_eof()  # it may read the order as a part of what to start
        await self._writer.drain()


class RunCluster(distributed.LocalCluster):
    """Keeps a worker that was lost: its nanny, or its `NannyProcess`, starts another one.

    Dask closes it for ever if no worker of that name is there 15 s after the loss, however far the
    start of the other one is, on a machine under load.

    A start that Ctrl-C or SIGTERM interrupts is given up: Dask would leave the workers that have
    begun, and print what it then misses when Python exits.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Start it; the arguments are those of `distributed.LocalCluster`."""
        try:
            super().__init__(**kwargs)
        except Exception:
            raise
        except BaseException:
            if self in self._instances and self._loop_runner.is_started():
                with contextlib.suppress(Exception):
                    self.sync(self._give_up)
            raise

    async def _give_up(self) -> None:
        await asyncio.gather(*(worker.close() for worker in list(self._created)))
        await self._close()

    def _update_worker_status(self, op: str, msg: Any) -> None:
        with dask.config.set({"distributed.deploy.lost-worker-timeout": NEVER_S}):
            super()._update_worker_status(op, msg)


@exported_by("prefect_torch_ddp")
def local_cluster(*, ranks_per_worker: int = 1, **kwargs: Any) -> distributed.LocalCluster:
    """Start a Dask cluster on this machine, made for ranks, as `train_flow` does by itself.

    Each worker is a process with one thread, which loads torch as it starts. The ranks share the
    cores. Dask logs only warnings, unless `DASK_LOGGING__DISTRIBUTED` or Dask's configuration names
    another level. A task that was lost with its worker isn't run again by Dask, but by Prefect's
    retries.

    Args:
        ranks_per_worker: how many ranks each worker will have; the cores are shared by all ranks.
        kwargs: other arguments of `distributed.LocalCluster`, such as `n_workers`.

    Returns:
        The cluster, to be closed, or used by `with`.

    Raises:
        RuntimeError: a worker did not start.

    Example:
        The cluster of your own flow:

            from prefect import flow
            from prefect_dask import DaskTaskRunner
            from prefect_torch_ddp import local_cluster

            @flow(task_runner=DaskTaskRunner(cluster_class=local_cluster,
                                             cluster_kwargs={"n_workers": 2}))
            def mine() -> None: ...
    """
    n_workers = kwargs.get("n_workers")
    if n_workers is None:  # as LocalCluster chooses it
        n_workers = max(1, CPU_COUNT // (kwargs.get("threads_per_worker") or 1))
    num_ranks = ranks_per_worker * n_workers
    num_threads = str(max(1, CPU_COUNT // max(1, num_ranks)))
    # Dask runs the tasks of a killed worker again, silently; then a training would run twice.
    defaults: dict[str, Any] = {
        "threads_per_worker": 1,
        "processes": True,
        "worker_class": NannyProcess,
        "preload": [PRELOAD],  # torch loads while the worker still connects
        "dashboard_address": "127.0.0.1:0",  # None would bind port 8787 all the same
        "scheduler_kwargs": {"allowed_failures": 0},
        "scheduler_sync_interval": 5,  # s; else its name is told to the scheduler each second
        "env": {f"{lib}_NUM_THREADS": num_threads for lib in ("OMP", "MKL", "OPENBLAS")},
    }
    for name in ("env", "scheduler_kwargs"):  # what is given is added to ours
        kwargs[name] = {**defaults[name], **(kwargs.get(name) or {})}
    quiet_dask()
    with dask.config.set(nanny.QUIET | LOCKS):
        cluster = RunCluster(**{**defaults, **kwargs})
        _slow_heartbeats(cluster.scheduler)
        _restart_only_silent(cluster.scheduler)
        return cluster


def _slow_heartbeats(scheduler: Any) -> None:
    # Dask has no setting for it: the scheduler names the next interval in its answer.
    answer = scheduler.handlers["heartbeat_worker"]

    @functools.wraps(answer)
    def answer_slowly(**heartbeat: Any) -> dict[str, Any]:
        return {**answer(**heartbeat), "heartbeat-interval": HEARTBEAT_S}

    scheduler.handlers["heartbeat_worker"] = answer_slowly


def _restart_only_silent(scheduler: Any) -> None:
    # Dask restarts workers whose last heartbeat is older than its worker-ttl. After a sleep, as of
    # a laptop, its timer runs before it reads the heartbeats, and would find all of them old.
    timer = scheduler.periodic_callbacks.get("worker-ttl")
    if timer is None:  # the user has switched it off
        return
    check, gap_s = timer.callback, scheduler.worker_ttl / 4

    async def check_once_heard() -> None:
        await _awake_for(max(liveness_timeout_s(), 2 * HEARTBEAT_S), gap_s)
        await check()

    timer.callback = check_once_heard


async def _awake_for(seconds: float, gap_s: float) -> None:
    """Wait until this process has run for so long since it last stood still for longer than a gap.

    A loop that is blocked for some seconds again and again is no sleep: it must not put off the
    check for ever.
    """
    began_s = looked_s = time.time()  # Dask's clock, which also counts the machine's sleep
    while looked_s - began_s < seconds:
        await asyncio.sleep(1.0)
        now_s = time.time()
        if abs(now_s - looked_s) > gap_s:
            began_s = now_s
        looked_s = now_s
