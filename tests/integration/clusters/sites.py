"""What both batch systems have, commands, jobs and the processes of these; and a PBS cluster as far
as programs can tell: qsub, qdel and qstat, run by pbs_commands.py."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.integration.clusters import pbs_commands
from tests.support.waiting import HANG_S, wait_until


class Site:
    """A batch system of two nodes."""

    name: str
    job_variable: str
    node_address: str
    """Shell for the address of a job's node: 127.0.0.11 or 127.0.0.12, all of which are
    loopback, so nodes count as two hosts."""
    list_jobs: tuple[str, ...]
    cancel_job: tuple[str, ...]
    """As an operator does: SIGTERM, and later SIGKILL."""
    announce_end: tuple[str, ...]
    """As at the end of a job's time: by the signal ahead of it, or the one that ends it."""
    kill_job: tuple[str, ...]
    """SIGKILL at once, as at the end of a node's life."""

    def __init__(self, home: Path, mark: str, **environment: str) -> None:
        """Take a folder, and what a process needs to talk to it: all have the variable `mark`."""
        self.home = home
        self.environment = environment
        self._mark = f"{mark}={environment[mark]}"

    def call(self, *command: str) -> str:
        """Run one of the commands and return what it printed."""
        environment = os.environ | self.environment
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=HANG_S
        ).stdout

    def job_ids(self) -> list[str]:
        """Return the ids of all jobs that wait, run or end now."""
        return self.call(*self.list_jobs).split()

    def cancel(self, job_id: str) -> None:
        self.call(*self.cancel_job, job_id)

    def kill(self, job_id: str) -> None:
        self.call(*self.kill_job, job_id)

    def processes(self, job_id: str | None = None) -> list[psutil.Process]:
        """Return the living processes of a job, or of all jobs."""
        found = []
        for process in psutil.process_iter():
            try:
                # A process that has ended, and waits for its parent to look, has none.
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            except (OSError, psutil.Error):
                continue
            entries = environment.decode(errors="replace").split("\0")
            jobs = [entry for entry in entries if entry.startswith(f"{self.job_variable}=")]
            if self._mark in entries and jobs and job_id in (None, jobs[0].partition("=")[2]):
                found.append(process)
        return found

    def end_jobs(self) -> None:
        """Cancel all jobs and wait for their end."""
        for job_id in self.job_ids():
            command = [*self.cancel_job, job_id]
            subprocess.run(command, env=os.environ | self.environment, check=False)
        wait_until(lambda: not self.job_ids() and not self.processes(), what="the jobs' end")


class PbsSite(Site):
    """A PBS cluster of two nodes."""

    name = "pbs"
    job_variable = "PBS_JOBID"
    node_address = '$(head -n 1 "$PBS_NODEFILE")'
    list_jobs, cancel_job, kill_job = ("qstat",), ("qdel",), ("qdel", "-W", "force")
    announce_end = cancel_job


@contextmanager
def running_pbs(home: Path) -> Iterator[PbsSite]:
    """Put the commands below `home`; at the end delete all jobs and wait for their end."""
    (home / "jobs").mkdir()
    (home / "bin").mkdir()
    for name in ("qsub", "qdel", "qstat"):
        command = shlex.join([sys.executable, pbs_commands.__file__, name])
        (home / "bin" / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (home / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(home / "bin"), os.environ["PATH"]])
    site = PbsSite(home, "IMITATED_PBS_HOME", IMITATED_PBS_HOME=str(home), PATH=path)
    try:
        yield site
    finally:
        site.end_jobs()
