"""A real Slurm cluster on this machine: munged, slurmctld and two slurmd, gone at the end."""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.clusters.processes import processes_with
from tests.support.waiting import becomes_true, wait_until

NODES = ("node1", "node2")
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
READY_S = 60.0
STOP_S = 60.0
NUM_TRIES = 3

# Kills only the process group of a job's script, the least that Slurm has: ranks lead sessions
# of their own and must end by themselves. config_overrides: the nodes have what is said here,
# whatever this machine has. KillWait: SIGTERM to SIGKILL.
CONFIG = """
ClusterName=imitated
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CredType=cred/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core,CR_LLN
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=5
GresTypes=gpu
NodeName=DEFAULT CPUs=16 RealMemory=100000 Gres=gpu:2
NodeName=node1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=node2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=batch Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


def skip_without_slurm() -> None:
    """Skip the test, with what to install, on a machine that lacks Slurm."""
    if missing := [name for name in COMMANDS if not shutil.which(name, path=_search_path())]:
        pytest.skip(
            f"Slurm is not installed ({', '.join(missing)} not found): apt-get install {PACKAGES}, "
            "or make system-packages"
        )


@dataclass(frozen=True)
class SlurmSite:
    """A Slurm cluster of two nodes."""

    home: Path
    name = "slurm"
    job_variable = "SLURM_JOB_ID"
    node_address = "127.0.0.1${SLURMD_NODENAME#node}"
    """Shell for the address of a job's node: 127.0.0.11 or 127.0.0.12, all of which are
    loopback, so nodes count as two hosts."""

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.home / "slurm.conf"), "PATH": _search_path()}

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands and return what it printed."""
        environment = os.environ | self.environment
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=READY_S
        ).stdout

    def job_ids(self) -> list[str]:
        """Return the ids of all jobs that wait, run or end now."""
        return self.call("squeue", "--noheader", "--format=%i").split()

    def cancel(self, job_id: str) -> None:
        """End a job as an operator does: SIGTERM, and after KillWait SIGKILL."""
        self.call("scancel", job_id)

    def kill(self, job_id: str) -> None:
        """Kill a job's script and its process group at once, as at the end of a node's life."""
        self.call("scancel", "--signal=KILL", "--full", job_id)

    def processes(self, job_id: str | None = None) -> list[psutil.Process]:
        """Return the living processes of a job, or of all jobs."""
        return processes_with(
            f"SLURM_CONF={self.home / 'slurm.conf'}",
            f"{self.job_variable}={job_id or ''}",
            exact=bool(job_id),
        )


@contextmanager
def running_slurm(home: Path) -> Iterator[SlurmSite]:
    """Start Slurm below `home`; at the end cancel all jobs, wait for them, stop the daemons."""
    with ExitStack() as daemons:
        site = _start(home, daemons)
        try:
            yield site
        finally:
            for job_id in site.job_ids():
                subprocess.run(["scancel", job_id], env=os.environ | site.environment, check=False)
            wait_until(lambda: not site.job_ids() and not site.processes(), what="the jobs' end")


def _start(home: Path, daemons: ExitStack) -> SlurmSite:
    for number in range(NUM_TRIES):  # another process may take a free port before a daemon does
        folder = home / str(number)
        folder.mkdir()
        site = SlurmSite(folder)
        with ExitStack() as tried:
            _configure(site)
            munge = (
                "--key-file=munge.key",
                "--seed-file=munge.seed",
                "--pid-file=munge.pid",
                "--socket=munge.socket",
            )
            # --force: pytest's folders are closed to other users, of which munged would
            # complain; there are none here.
            options = [option.replace("=", f"={folder}/") for option in munge]
            tried.enter_context(
                _daemon(site, "munged", "munged", "--foreground", "--force", *options)
            )
            becomes_true((folder / "munge.socket").exists, READY_S)
            tried.enter_context(_daemon(site, "slurmctld", "slurmctld", "-D"))
            for node in NODES:
                tried.enter_context(_daemon(site, node, "slurmd", "-D", "-N", node))
            if becomes_true(lambda site=site: _num_idle(site) == len(NODES), READY_S):  # type: ignore[misc]
                daemons.push(tried.pop_all())
                return site
    pytest.fail(
        "Slurm did not start:\n"
        + "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
    )


def _configure(site: SlurmSite) -> None:
    home = site.home
    user = pwd.getpwuid(os.getuid()).pw_name
    (home / "slurm.conf").write_text(
        CONFIG.format(home=home, ports=_free_ports(1 + len(NODES)), user=user)
    )
    (home / "cgroup.conf").touch()
    # Slurm counts GPUs by their device files, and is content with any files.
    for number in range(2):
        (home / f"gpu{number}").touch()
    (home / "gres.conf").write_text(
        "".join(f"NodeName={node} Name=gpu File={home}/gpu[0-1]\n" for node in NODES)
    )
    (home / "munge.key").write_bytes(secrets.token_bytes(128))
    (home / "munge.key").chmod(0o600)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (home / name).mkdir()


@contextmanager
def _daemon(site: SlurmSite, name: str, *command: str) -> Iterator[None]:
    with (site.home / f"{name}.output.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | site.environment
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _num_idle(site: SlurmSite) -> int:
    command = ("sinfo", "--noheader", "--Node", "--format=%T")
    answer = subprocess.run(
        command, env=os.environ | site.environment, check=False, capture_output=True, text=True
    )
    return answer.stdout.split().count("idle")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [found.getsockname()[1] for found in sockets]


def _search_path() -> str:
    """Return PATH with the folders of Debian's daemons, which a user's PATH may lack."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
