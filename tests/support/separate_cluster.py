"""A Dask cluster as an operator runs it: every scheduler, nanny and worker is a process."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
from distributed import Client

from tests.support.gangs import all_gone
from tests.support.waiting import HANG_S, wait_until


def stop(process: psutil.Process) -> None:
    """SIGSTOP it, and wait until it is stopped."""
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


def end(process: psutil.Process) -> None:
    """Kill a process, also a stopped one, and everything that it has started.

    They are stopped first: what forks while it is looked at would leave a child behind. One that
    nobody has reaped yet has ended: on some machines process 1 takes its time.
    """
    everyone: set[psutil.Process] = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        while more := {process, *process.children(recursive=True)} - everyone:
            for member in more:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.suspend()
            everyone |= more
    for member in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    wait_until(lambda: all_gone(everyone), what=f"the end of {everyone}")


class SeparateCluster:
    """Its processes, found when asked for: a nanny starts another worker process when one has
    died."""

    def __init__(self, folder: Path) -> None:
        """Leave logs and the scheduler's address in the folder; nothing is started."""
        self.folder = folder
        self.address = ""
        self.scheduler: psutil.Process
        self.nannies: list[psutil.Process] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, num_workers: int, options: tuple[str, ...]) -> None:
        self.folder.mkdir(exist_ok=True)
        self.scheduler = self.run("scheduler", "--port", "0")
        scheduler_file = self.folder / "scheduler.json"
        wait_until(scheduler_file.exists, HANG_S)
        self.nannies = [
            self.run("worker", "--nthreads", "1", "--name", f"w{i}", *options)
            for i in range(num_workers)
        ]
        with Client(scheduler_file=str(scheduler_file)) as client:
            client.wait_for_workers(num_workers, timeout=HANG_S)
            self.address = client.scheduler.address

    def processes(self) -> set[psutil.Process]:
        """Return all there are, with those of gangs."""
        tops = (self.scheduler, *self.nannies)
        return {each for top in tops for each in (top, *top.children(recursive=True))}

    def run(self, what: str, *options: str) -> psutil.Process:
        """Start one more process of `dask scheduler` or `dask worker`."""
        command = [
            sys.executable,
            "-m",
            "dask",
            what,
            "--scheduler-file",
            str(self.folder / "scheduler.json"),
        ]
        command += ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", *options]
        work = self.folder / f"{what}-{len(self._started)}"
        work.mkdir()
        with (work / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=work, stdout=log, stderr=log, env=dict(os.environ)
            )
        self._started.append(process)
        return psutil.Process(process.pid)

    def close(self) -> None:
        for process in reversed(self._started):
            with contextlib.suppress(psutil.NoSuchProcess):
                end(psutil.Process(process.pid))
            process.wait()


@contextlib.contextmanager
def separate_cluster(
    folder: Path, num_workers: int = 2, *options: str
) -> Iterator[SeparateCluster]:
    """Run a scheduler and workers with nannies; options are of `dask worker`."""
    cluster = SeparateCluster(folder)
    try:
        cluster.start(num_workers, options)
        yield cluster
    finally:
        cluster.close()
