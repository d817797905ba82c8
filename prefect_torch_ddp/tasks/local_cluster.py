"""The local Dask cluster that a run makes for itself: quiet, so that its cores are the ranks'."""

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import Any

import dask
import distributed
from dask.system import CPU_COUNT

from prefect_torch_ddp.gang.warm import warm
from prefect_torch_ddp.gang.worker import fork_launch

LOG_LEVEL = "DASK_LOGGING__DISTRIBUTED"
CLUSTER_CONFIG = {
    # Dask leaves these in this process too, and would OMP_NUM_THREADS=1 and more; `env` below
    # reaches the workers alone, but after their imports, when it's too late for this one.
    "distributed.nanny.pre-spawn-environ": {LOG_LEVEL: "warning"},
    # Of the two cores of a small machine an idle cluster of two takes 0.08 with Dask's
    # defaults, 0.017 with these.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "2s",
    "distributed.worker.memory.monitor-interval": "2s",
    "distributed.admin.system-monitor.interval": "5s",
}
_STARTING = threading.Lock()
"""One at a time: a start changes Dask's configuration and the main module's name meanwhile."""
HEARTBEAT_S = 5.0
"""How often a worker tells the scheduler of itself. Dask's own twice a second take 7 ms of a core
in each second, which two ranks that fill two cores wait for."""


def local_cluster(*, ranks_per_worker: int = 1, **kwargs: Any) -> distributed.LocalCluster:
    """Start a local cluster for one run: a process and a thread per worker, the cores shared."""
    num_ranks = ranks_per_worker * (kwargs.get("n_workers") or 1)
    num_threads = str(max(1, CPU_COUNT // max(1, num_ranks)))
    # Dask runs the tasks of a killed worker again, silently; then a training would run twice.
    defaults = {
        "threads_per_worker": 1,
        "processes": True,
        "preload": [warm.__module__],  # torch loads while the worker still connects
        "dashboard_address": "127.0.0.1:0",  # None would bind port 8787 all the same
        "scheduler_kwargs": {"allowed_failures": 0},
        "scheduler_sync_interval": 5,  # s; else its name is told to the scheduler each second
        "env": {f"{lib}_NUM_THREADS": num_threads for lib in ("OMP", "MKL", "OPENBLAS")},
    }
    # Else Dask writes some 70 lines about itself between the run's own.
    logging.getLogger("distributed").setLevel(logging.WARNING)
    with (
        _STARTING,
        dask.config.set(CLUSTER_CONFIG),
        _another_main(),
        contextlib.ExitStack() as stack,
    ):
        if LOG_LEVEL not in os.environ:
            stack.callback(os.environ.pop, LOG_LEVEL, None)
        cluster = distributed.LocalCluster(**{**defaults, **kwargs})
        _slow_heartbeats(cluster.scheduler)
        return cluster


def _slow_heartbeats(scheduler: Any) -> None:
    # Dask has no setting for it: the scheduler names the next interval in its answer.
    answer = scheduler.handlers["heartbeat_worker"]

    @functools.wraps(answer)
    def answer_slowly(**heartbeat: Any) -> dict[str, Any]:
        return {**answer(**heartbeat), "heartbeat-interval": HEARTBEAT_S}

    scheduler.handlers["heartbeat_worker"] = answer_slowly


@contextmanager
def _another_main() -> Iterator[None]:
    """Have workers that are spawned now begin with their fork server, not the caller's script.

    That would load Prefect in each of them, 1.4 s of a core. Dask pickles by value what the script
    defines, and a worker that its nanny starts again imports it as ever.
    """
    main = sys.modules["__main__"]
    # What multiprocessing looks at, in `spawn.get_preparation_data`.
    names = ("__spec__", "__file__")
    kept: dict[str, Any] = {name: vars(main).pop(name) for name in names if name in vars(main)}
    main.__spec__ = ModuleSpec(fork_launch.__name__, None)
    try:
        yield
    finally:
        vars(main).update({"__spec__": None} | kept)
