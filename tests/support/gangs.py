"""Gangs for tests: separate clusters, gangs in a thread, and what their ranks left."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

from prefect_torch_ddp import run_gang
from prefect_torch_ddp.protocol.call import Call
from prefect_torch_ddp.protocol.events import AttemptBegan, GangEvent
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import failing, plain, write_pid

RUN_WITH_CONTEXT: Any = Call("prefect_torch_ddp.rank.stages:run_with_context", takes_context=True)


@contextlib.contextmanager
def own_cluster(
    num_workers: int, threads_per_worker: int = 1, **options: Any
) -> Iterator[tuple[LocalCluster, Client]]:
    """Start a cluster that the test may harm.

    It would silence its logger's handlers, which caplog's are if that logger had been configured
    before the test; DASK_LOGGING__DISTRIBUTED does so for all.
    """
    options |= {"n_workers": num_workers, "threads_per_worker": threads_per_worker}
    options.setdefault("silence_logs", False)
    with LocalCluster(dashboard_address=":0", **options) as cluster, Client(cluster) as client:
        client.wait_for_workers(num_workers, timeout=HANG_S)
        yield cluster, client


@contextlib.contextmanager
def extra_worker(cluster: LocalCluster, num_workers: int) -> Iterator[psutil.Process]:
    """Join a worker without a nanny to a cluster: once killed it never comes back."""
    options = ["--no-nanny", "--nthreads", "1", "--no-dashboard"]
    command = [sys.executable, "-m", "dask", "worker", cluster.scheduler_address, *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with Client(cluster) as client:
            client.wait_for_workers(num_workers, timeout=HANG_S)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()
        # The next gang on the cluster is not to be offered it.
        wait_until(lambda: len(cluster.scheduler.workers) < num_workers)


def pids_in(
    folder: Path, num_ranks: int, timeout_s: float = HANG_S, *, of: Future[Any] | None = None
) -> list[int]:
    """Wait until all ranks have written their pids and return them; raise why their gang ended."""

    def texts() -> list[str]:
        if of is not None and of.done():
            of.result()
        return [path.read_text() for path in sorted(folder.iterdir()) if path.name.isdigit()]

    wait_until(lambda: len(list(filter(None, texts()))) == num_ranks, timeout_s, "all ranks' pids")
    return [int((folder / str(rank)).read_text()) for rank in range(num_ranks)]


def begun(folder: Path, attempt: int, rank: int) -> tuple[int, int]:
    """Wait until a rank of `hanging.train_until_enough` trains; return its pid, and its attempt's
    first step."""
    wait_until(lambda: any(folder.glob(f"{attempt}-{rank}-from-*[0-9]")), HANG_S)
    (mark,) = folder.glob(f"{attempt}-{rank}-from-*[0-9]")
    return int(mark.read_text()), int(mark.name.rpartition("-")[2])


@contextlib.contextmanager
def sleeping_gang(
    client: Client, folder: Path, **options: Any
) -> Iterator[tuple["Future[list[object]]", list[psutil.Process]]]:
    """Run a gang, of two, in a thread; give its future and its ranks, once all are there."""
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(1) as pool:
        call = {"args": (str(folder),), "world_size": 2, **options}
        gang = pool.submit(run_gang, client, failing.sleep_for_ever, **call)
        num_ranks = int(call["world_size"])
        yield gang, [psutil.Process(pid) for pid in pids_in(folder, num_ranks)]


def call_sleeping_gang(address: str, folder: str) -> None:
    """Run a gang as a separate caller, in a process that needs no torch."""
    with Client(address) as client:
        run_gang(client, failing.sleep_for_ever, args=(folder,), world_size=2)


def call_releasable_gang(address: str, folder: str) -> list[int]:
    """Run a gang as a separate caller, which leaves its pid; return in which attempt it ended."""
    write_pid(folder, "caller")
    with Client(address) as client:
        call = {"args": (folder,), "world_size": 2, "max_restarts": 1}
        return run_gang(client, plain.attempt_once_released, **call)


def workers_of(client: Client) -> dict[str, psutil.Process]:
    """Return the worker processes by address, in order."""
    return {address: psutil.Process(pid) for address, pid in sorted(client.run(os.getpid).items())}


def all_gone(processes: Iterable[psutil.Process]) -> bool:
    """Tell whether none of them runs."""
    return not any(map(_runs, processes))


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def alive(pids: Iterable[int]) -> list[int]:
    """Return those that run; one that nobody has reaped yet doesn't."""
    return [pid for pid in pids if psutil.pid_exists(pid) and not all_gone([psutil.Process(pid)])]


def said_by_ranks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the ranks' logger: on a loaded machine Dask logs too, of its loop."""
    found = [each for each in caplog.records if each.name == "prefect_torch_ddp.ranks"]
    return [each.getMessage() for each in found]


def by_rank(messages: Iterable[str]) -> list[str]:
    """Return the log's lines, those of several ranks once for each of them."""
    lines = []
    for message in messages:
        said = re.fullmatch(r"\[ranks ([\d, -]+)\] (.*)", message, re.DOTALL)
        if said is None:
            lines.append(message)
            continue
        for run in said[1].split(", "):
            first, _, last = run.partition("-")
            ranks = range(int(first), int(last or first) + 1)
            lines += [f"[rank {rank}] {said[2]}" for rank in ranks]
    return lines


def attempts_in(events: Sequence[GangEvent]) -> list[tuple[int, int]]:
    """Return number and size of each attempt."""
    return [
        (event.attempt, event.world_size) for event in events if isinstance(event, AttemptBegan)
    ]
