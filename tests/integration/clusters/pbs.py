"""A PBS cluster as far as programs can tell: qsub, qdel and qstat, run by pbs_commands.py."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.integration.clusters import pbs_commands
from tests.integration.clusters.processes import processes_with
from tests.support.waiting import wait_until


@dataclass(frozen=True)
class PbsSite:
    """A PBS cluster of two nodes."""

    home: Path
    name = "pbs"
    job_variable = "PBS_JOBID"
    node_address = '$(head -n 1 "$PBS_NODEFILE")'
    """Shell for the address of a job's node."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            "IMITATED_PBS_HOME": str(self.home),
            "PATH": os.pathsep.join([str(self.home / "bin"), os.environ["PATH"]]),
        }

    def call(self, *command: str) -> str:
        """Run one of the commands and return what it printed."""
        environment = os.environ | self.environment
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout

    def job_ids(self) -> list[str]:
        """Return the ids of all jobs that run or end now."""
        return self.call("qstat").split()

    def cancel(self, job_id: str) -> None:
        """End a job as an operator does: SIGTERM, and later SIGKILL."""
        self.call("qdel", job_id)

    def kill(self, job_id: str) -> None:
        self.call("qdel", "-W", "force", job_id)

    def processes(self, job_id: str | None = None) -> list[psutil.Process]:
        """Return the living processes of a job, or of all jobs."""
        return processes_with(
            f"IMITATED_PBS_HOME={self.home}",
            f"{self.job_variable}={job_id or ''}",
            exact=bool(job_id),
        )


@contextmanager
def running_pbs(home: Path) -> Iterator[PbsSite]:
    """Put the commands below `home`; at the end delete all jobs and wait for their end."""
    (home / "jobs").mkdir()
    (home / "bin").mkdir()
    for name in ("qsub", "qdel", "qstat"):
        command = shlex.join([sys.executable, pbs_commands.__file__, name])
        (home / "bin" / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (home / "bin" / name).chmod(0o755)
    site = PbsSite(home)
    try:
        yield site
    finally:
        for job_id in site.job_ids():
            subprocess.run(["qdel", job_id], env=os.environ | site.environment, check=False)
        wait_until(lambda: not site.job_ids() and not site.processes(), what="the jobs' end")
