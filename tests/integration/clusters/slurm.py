"""A real Slurm cluster on this machine: munged, slurmctld and two slurmd, gone at the end."""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.integration.clusters.sites import Site
from tests.support.ports import free_ports
from tests.support.waiting import HANG_S, becomes_true

NODES = ("node1", "node2")
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
NUM_TRIES = 3

# Kills only the process group of a job's script, the least that Slurm has: ranks lead sessions
# of their own and must end by themselves. config_overrides: the nodes have what is set here,
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
SlurmdSpoolDir={spool}/%n
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
        lacks = f"Slurm is not installed ({', '.join(missing)} not found)"
        pytest.skip(f"{lacks}: apt-get install {PACKAGES}, or make system-packages")


class SlurmSite(Site):
    """A Slurm cluster of two nodes."""

    name = "slurm"
    job_variable = "SLURM_JOB_ID"
    node_address = "127.0.0.1${SLURMD_NODENAME#node}"
    list_jobs, cancel_job = ("squeue", "--noheader", "--format=%i"), ("scancel",)
    kill_job = ("scancel", "--signal=KILL", "--full")
    announce_end = ("scancel", "--signal=USR1", "--batch")  # as `sbatch --signal=B:USR1@...` does


@contextmanager
def running_slurm(home: Path) -> Iterator[SlurmSite]:
    """Start Slurm below `home`; at the end cancel all jobs, wait for them, stop the daemons."""
    with ExitStack() as daemons:
        site = _start(home, daemons)
        try:
            yield site
        finally:
            site.end_jobs()


def _start(home: Path, daemons: ExitStack) -> SlurmSite:
    for number in range(NUM_TRIES):  # another process may take a free port before a daemon does
        folder = home / str(number)
        folder.mkdir()
        conf = str(folder / "slurm.conf")
        site = SlurmSite(folder, "SLURM_CONF", SLURM_CONF=conf, PATH=_search_path())
        with ExitStack() as tried:
            # Sockets of jobs are there, and a socket's path has at most 108 characters; one in
            # pytest's folder of a test with a long name, in one of several processes, has more.
            spool = tempfile.TemporaryDirectory(prefix="ptd-slurm-")
            _configure(site, Path(tried.enter_context(spool)))
            files = {"key-file": "key", "seed-file": "seed", "pid-file": "pid", "socket": "socket"}
            options = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
            # --force: pytest's folders are closed to other users, of which munged would
            # complain; there are none here.
            munged = ("munged", "--foreground", "--force", *options)
            tried.enter_context(_daemon(site, "munged", *munged))
            becomes_true((folder / "munge.socket").exists, HANG_S)
            tried.enter_context(_daemon(site, "slurmctld", "slurmctld", "-D"))
            for node in NODES:
                tried.enter_context(_daemon(site, node, "slurmd", "-D", "-N", node))
            if becomes_true(lambda site=site: _num_idle(site) == len(NODES), HANG_S):  # type: ignore[misc]
                daemons.push(tried.pop_all())
                return site
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
    pytest.fail(f"Slurm did not start:\n{logs}")


def _configure(site: SlurmSite, spool: Path) -> None:
    home = site.home
    user = pwd.getpwuid(os.getuid()).pw_name
    (home / "slurm.conf").write_text(
        CONFIG.format(home=home, spool=spool, ports=free_ports(1 + len(NODES)), user=user)
    )
    (home / "cgroup.conf").touch()
    # Slurm counts GPUs by their device files, and is content with any files.
    for number in range(2):
        (home / f"gpu{number}").touch()
    gpus = [f"NodeName={node} Name=gpu File={home}/gpu[0-1]\n" for node in NODES]
    (home / "gres.conf").write_text("".join(gpus))
    (home / "munge.key").write_bytes(secrets.token_bytes(128))
    (home / "munge.key").chmod(0o600)
    for folder in (home / "state", *(spool / node for node in NODES)):
        folder.mkdir()


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
                process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _num_idle(site: SlurmSite) -> int:
    command = ("sinfo", "--noheader", "--Node", "--format=%T")
    answer = subprocess.run(
        command, env=os.environ | site.environment, check=False, capture_output=True, text=True
    )
    return answer.stdout.split().count("idle")


def _search_path() -> str:
    """Return PATH with the folders of Debian's daemons, which a user's PATH may lack."""
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
