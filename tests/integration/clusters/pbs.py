"""A PBS cluster as far as programs can tell: qsub, qdel and qstat, run by pbs_commands.py."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.clusters import pbs_commands
from tests.integration.clusters.processes import Site


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
