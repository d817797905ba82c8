"""Stand-ins for PBS's qsub, qdel and qstat, which run job scripts here as pbs_mom would.

They use only the standard library.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NODES = ("127.0.0.11", "127.0.0.12")
"""Both are loopback, so that jobs are on two hosts as far as programs can tell."""
KILL_DELAY_S = 5.0
FORMAT = "{}.imitated"


def qsub(home: Path, script: str) -> None:
    """Keep a copy of the script, start it, and print the job's id."""
    number = 1
    while True:
        try:
            (home / "jobs" / str(number)).mkdir()
            break
        except FileExistsError:
            number += 1
    job = home / "jobs" / str(number)
    shutil.copy(script, job / "script")
    (job / "nodes").write_text(NODES[number % len(NODES)] + "\n")
    # The mom is nobody's child when this command ends.
    command = [sys.executable, __file__, "mom", str(job)]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    with (job / "mom.log").open("wb") as log:
        subprocess.Popen(command, start_new_session=True, stderr=log, **quiet)  # type: ignore[call-overload]
    print(FORMAT.format(number))


def mom(job: Path) -> None:
    """Run a job's script in a session until it ends or is deleted, and kill that session."""
    directives = [
        line.split(maxsplit=2)[1:]
        for line in (job / "script").read_text().splitlines()
        if line.startswith("#PBS ")
    ]
    options = {words[0]: words[-1] for words in directives}
    (job / "tmp").mkdir()
    environment = os.environ | {
        "PBS_JOBID": FORMAT.format(job.name),
        "PBS_JOBNAME": options.get("-N", "script"),
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_QUEUE": options.get("-q", "workq"),
        "PBS_NODEFILE": str(job / "nodes"),
        "PBS_O_WORKDIR": str(Path.cwd()),
        "TMPDIR": str(job / "tmp"),
    }
    output = Path(options.get("-o", str(job)), FORMAT.format(job.name) + ".OU")
    with output.open("wb") as log:
        command = ["bash", str(job / "script")]
        script = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=Path.home(),
            env=environment,
            start_new_session=True,
        )
    (job / "session").write_text(str(script.pid))
    while script.poll() is None and not (job / "delete").exists():
        time.sleep(0.05)
    deadline = time.monotonic() + (0 if (job / "force").exists() else KILL_DELAY_S)
    _signal(script.pid, signal.SIGTERM)
    while script.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(script.pid, signal.SIGKILL)
    script.wait()
    (job / "ended").touch()


def _signal(session: int, number: signal.Signals) -> None:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which may hold anything: state, parent, process group, session.
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                os.kill(int(stat.parent.name), number)
        except (OSError, ValueError):
            continue


def qdel(home: Path, *arguments: str) -> None:
    """Ask the job's mom to end it: SIGTERM, later SIGKILL; with `-W force` SIGKILL at once."""
    job = home / "jobs" / arguments[-1].partition(".")[0]
    if not job.exists() or (job / "ended").exists():
        sys.exit(f"qdel: Unknown Job Id {arguments[-1]}")
    if arguments[:-1] == ("-W", "force"):
        (job / "force").touch()
    (job / "delete").touch()


def qstat(home: Path) -> None:
    """Print the ids of the jobs that have not ended."""
    for job in sorted((home / "jobs").iterdir(), key=lambda job: int(job.name)):
        if not (job / "ended").exists():
            print(FORMAT.format(job.name))


if __name__ == "__main__":
    if sys.argv[1] == "mom":
        mom(Path(sys.argv[2]))
    else:
        command = {"qsub": qsub, "qdel": qdel, "qstat": qstat}[sys.argv[1]]
        command(Path(os.environ["IMITATED_PBS_HOME"]), *sys.argv[2:])
