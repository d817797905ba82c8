"""The pages of batch systems as somebody on a login node types them, on Slurm's own daemons."""

import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefect_torch_ddp import read_metrics
from prefect_torch_ddp.records.run_record import RunRecord, list_run_records
from prefect_torch_ddp.storage.directory import DirectoryStorage
from tests.integration.clusters.sites import Site
from tests.integration.test_manual import answers, terminal
from tests.support.newcomer import newcomers_environment
from tests.support.ports import free_port
from tests.support.printed import compared
from tests.support.waiting import HANG_S, wait_until

DOCS = Path(__file__).parents[3] / "docs"
PAGES = (DOCS / "batch.md", DOCS / "batch_sites.md")
BLOCK = re.compile(r"^```(?:yaml|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"\A(?:#!.*\n)?# (\w+\.(?:yaml|sh))\n")
COMMAND_S = 300
MOST_LINES = 40
OFFLINE = {"PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
"""For the server of the tests' operator: it would call Prefect's makers."""


def typed(block: str, folder: Path, port: int) -> str:
    """Adapt a block as an operator does: folder, environment, server, network, accounts."""
    activate = "source /shared/me/venv/bin/activate"
    changes = {
        activate: f"export PATH={Path(sys.executable).parent}:$PATH",
        "/shared/me": str(folder),
        "login1:4200": f"127.0.0.1:{port}",
        "localhost:4200": f"127.0.0.1:{port}",
        "--port 4200": f"--port {port}",
        "0.0.0.0": "127.0.0.1",
        "eth0": "lo",
        ":8787": "127.0.0.1:0",
    }
    for old, new in changes.items():
        block = block.replace(old, new)
    return block


def one_job(folder: Path, port: int) -> str:
    """Return the page's script of a job that holds all, adapted."""
    (script,) = (
        typed(found, folder, port)
        for found in BLOCK.findall(PAGES[0].read_text("utf-8"))
        if (named := NAMED.match(found)) and named[1] == "one_job.sh"
    )
    return script


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("batch_system", ["slurm"], indirect=True)
def test_the_pages_of_a_batch_system_as_they_are_typed(site: Site, tmp_path: Path) -> None:
    """Jobs of a flow, of a deployment, of a flow in a job, and one of two nodes complete runs."""
    port, project = free_port(), tmp_path / "project"
    project.mkdir()
    environment = newcomers_environment(tmp_path, Path(sys.executable).parent, **site.environment)
    exports, said = "", {}
    with ExitStack() as terminals:
        for found in BLOCK.findall("".join(page.read_text("utf-8") for page in PAGES)):
            block = typed(found, tmp_path, port)
            if named := NAMED.match(block):
                (project / named[1]).write_text(block, encoding="utf-8")
            elif block.startswith("# in a terminal"):
                terminals.enter_context(terminal(block, tmp_path, environment | OFFLINE))
                if "server start" in block:
                    wait_until(lambda: answers(f"http://127.0.0.1:{port}/api"), what="a server")
            elif not block.startswith("# once"):
                began_s = time.monotonic()
                run = {"env": environment, "text": True, "timeout": COMMAND_S}
                both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
                done = subprocess.run(
                    ["bash", "-ec", exports + block], cwd=project, check=False, **run, **both
                )
                assert done.returncode == 0, block + done.stdout[-4000:]
                print(f"{time.monotonic() - began_s:.1f} s: {block.strip()[:60]}")
                said[block.split(" ")[1]] = done.stdout
                if "export " in block:
                    exports = block
                if block.startswith("sbatch "):
                    wait_until(lambda: not site.job_ids(), 4 * HANG_S, "the job's end")
        wait_until(lambda: not site.processes(), what="the end of the jobs' processes")
    assert "#SBATCH -A project-1" in said["doctor"]
    assert "nothing is wrong" in said["doctor"]
    assert "accuracy" in said["train"]
    assert len(said["train"].splitlines()) <= MOST_LINES, said["train"]
    differs = compared(DOCS.parent / "tests/wheel/golden/a_batch_run.txt", said["train"], tmp_path)
    assert not differs, differs
    jobs = [(project / "digits.log").read_text(), (project / "digits-flow.log").read_text()]
    places = ("runs", "chains/digits", "chains/digits-flow")
    states = [
        [run.state for run in list_run_records(DirectoryStorage(tmp_path / place))]
        for place in places
    ]
    assert states == [["completed"] * 2, ["completed"], ["completed"]], jobs
    assert all("accuracy" in job for job in jobs)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch_system", ["slurm"], indirect=True)
def test_a_job_that_is_requeued_does_not_take_its_former_scheduler(
    site: Site, tmp_path: Path, prefect_api: str
) -> None:
    """It keeps its number, so the file of the scheduler that ended is there, under its name."""
    port = int(prefect_api.removesuffix("/api").rpartition(":")[2])
    former = f'{{"type": "Scheduler", "address": "tcp://127.0.0.1:{free_port()}"}}'
    given = f"cat > scheduler-$SLURM_JOB_ID.json <<'END'\n{former}\nEND\n"
    (tmp_path / "one_job.sh").write_text(
        one_job(tmp_path, port).replace("\nfile=", f"\n{given}file=")
    )
    submit = ["sbatch", "--job-name=again", "one_job.sh", "-o", "epochs=1"]
    subprocess.run(submit, cwd=tmp_path, check=True, capture_output=True)
    wait_until(lambda: not site.job_ids() and not site.processes(), 4 * HANG_S, "the job's end")
    log = (tmp_path / "again.log").read_text()
    states = [
        run.state for run in list_run_records(DirectoryStorage(tmp_path / "chains" / "again"))
    ]
    assert states == ["completed"], log


@pytest.mark.more
@pytest.mark.timeout(600)
@pytest.mark.parametrize("batch_system", ["slurm"], indirect=True)
def test_a_job_that_holds_all_submits_itself_again_until_it_is_cancelled(
    site: Site, tmp_path: Path, prefect_api: str
) -> None:
    """At the signal before its end all ranks save, and the next job goes on there; after SIGTERM to
    its script, which saves too, no job follows. The chain keeps its name, storage and options."""
    port = int(prefect_api.removesuffix("/api").rpartition(":")[2])
    (tmp_path / "one_job.sh").write_text(one_job(tmp_path, port))
    folder = tmp_path / "chains" / "long"
    storage = DirectoryStorage(folder)

    def trains(run: RunRecord) -> bool:
        found = (folder / "runs" / run.run_id / "checkpoints").glob("step-*")
        return run.state == "training" and any(found)

    def states() -> list[str]:
        return [
            run.state for run in list_run_records(storage) if run.state != "training" or trains(run)
        ]

    submit = ["sbatch", "--job-name=long", "one_job.sh", "-o", "epochs=100000"]
    subprocess.run(submit, cwd=tmp_path, check=True, capture_output=True)
    wait_until(lambda: states() == ["training"], 4 * HANG_S, "the first job's checkpoint")
    (first_job,) = site.job_ids()
    site.call(*site.announce_end, first_job)
    wait_until(
        lambda: states() == ["training", "cancelled"], 4 * HANG_S, "the second job's checkpoint"
    )
    (second_job,) = site.job_ids()
    site.call("scancel", "--batch", "--signal=TERM", second_job)
    wait_until(lambda: not site.job_ids(), HANG_S, "the end of the second job")

    log = (tmp_path / "long.log").read_text()
    assert second_job != first_job, log
    assert states() == ["cancelled", "cancelled"], log
    second, first = list_run_records(storage)
    assert first.checkpoint is not None
    assert read_metrics(storage, second.run_id).step.min() == first.checkpoint.step + 1, log
