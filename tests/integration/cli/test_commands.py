"""The command runs real flows under a real server, in a separate folder."""

import csv
import fcntl
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.states import Running

from prefect_torch_ddp import DirectoryStorage, list_runs
from prefect_torch_ddp.records.run_record import write_run_record
from prefect_torch_ddp.server import is_prefect
from tests.support.pages import RECORD
from tests.support.ports import free_port
from tests.support.waiting import HANG_S, wait_until
from tests.support.workers import prefect
from tests.workloads import torchrun_script

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[3]
WORKLOAD = "my_workload"
LIMIT_S = 180
MAX_LINES = 25
WRONG = "if ctx.step == 20: torch.nn.Linear(3, 1)(torch.zeros(2, 2))"
SAYS = "mat1 and mat2 shapes cannot be multiplied"
SCRIPT = """
from prefect_torch_ddp import TrainParams, train_flow

if __name__ == "__main__":
    train_flow(TrainParams(workload="failing", world_size=2, storage="store"))
"""
SCRIPTS = {
    "the pipeline": SCRIPT,
    "the pipeline in a flow": """
from prefect import flow
from prefect_torch_ddp import TrainParams, train_flow

@flow
def nightly():
    return train_flow(TrainParams(workload="failing", world_size=2, storage="store"))

if __name__ == "__main__":
    nightly()
""",
    "a task": """
from prefect import flow
from prefect_dask import DaskTaskRunner
from prefect_torch_ddp import ddp_task, local_cluster
import failing

fit = ddp_task(failing.wrong, world_size=2, storage="store")

@flow(task_runner=DaskTaskRunner(cluster_class=local_cluster, cluster_kwargs={"n_workers": 2}))
def line():
    return fit.submit().result()

if __name__ == "__main__":
    line()
""",
    "a call": """
from distributed import Client, LocalCluster
from prefect_torch_ddp import run_gang

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1) as cluster, Client(cluster) as client:
        run_gang(client, "failing:wrong", args=(None,), world_size=2)
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with the README's workload."""
    _, rest = (ROOT / "README.md").read_text(encoding="utf-8").split(f"# {WORKLOAD}.py\n")
    source = rest.partition("\n```")[0]
    (tmp_path / f"{WORKLOAD}.py").write_text(source, encoding="utf-8")
    failing = source.replace("loss.backward()", f"loss.backward()\n        {WRONG}")
    wrong = "\n\ndef wrong(ctx):\n    torch.nn.Linear(3, 1)(torch.zeros(2, 2))\n"
    (tmp_path / "failing.py").write_text(failing + wrong, encoding="utf-8")
    return tmp_path


def typed(folder: Path, *given: str, status: int = 0, **environment: str) -> tuple[str, str]:
    """Run the command in a folder; give what it prints and what else it says."""
    command = ["-P", "-m", "prefect_torch_ddp", *given]
    return ran(folder, *command, status=status, **environment)


def ran(folder: Path, *given: str, status: int = 0, **environment: str) -> tuple[str, str]:
    """Run Python in a folder; give what it prints and what else it says."""
    done = subprocess.run(
        [sys.executable, *given],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_a_run_is_trained_listed_shown_read_and_resumed(folder: Path) -> None:
    """From one file come two runs, the second of which resumes from the first."""
    at = ["--storage", "store"]
    printed, _ = typed(folder, "train", WORKLOAD, "--world-size", "2", "-o", "epochs=3", *at)
    (first,) = list_runs(folder / "store")["run_id"]
    for said in ("score       accuracy", "48 steps in 3 epochs on 2 ranks", first):
        assert said in printed
    head, line = typed(folder, "runs", *at)[0].splitlines()
    assert head.split() == ["RUN", "STATE", "BEGAN", "TOOK", "RANKS", "STEPS", "SCORE", "WORKLOAD"]
    assert line.split()[:2] == [first, "completed"]
    assert f"resume {first} -o NAME=VALUE" in typed(folder, "show", "latest", *at)[0]
    rows = list(csv.DictReader(io.StringIO(typed(folder, "metrics", first, "--csv", *at)[0])))
    assert max(int(row["step"]) for row in rows) == 48
    assert all(float(row["loss"]) > 0 for row in rows)

    _, refused = typed(folder, "resume", first, *at, status=2)
    assert refused.count("\n") == 1
    assert "is completed; say what more to do, e.g. -o epochs=30" in refused
    printed, _ = typed(folder, "resume", first[:8], "-o", "epochs=5", *at)
    assert "80 steps in 5 epochs on 2 ranks" in printed
    second = list_runs(folder / "store")["run_id"][0]
    assert second != first
    steps = {int(line.split(",")[0]) for line in csv_of(folder, second)}
    assert steps == set(range(49, 81)), "it begins where the first ended"


def csv_of(folder: Path, run_id: str) -> list[str]:
    """Return a run's rows."""
    printed, _ = typed(folder, "metrics", run_id, "--csv", "--storage", "store")
    return printed.splitlines()[1:]


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_a_resumed_run_that_saved_nothing_is_resumed_where_it_began(folder: Path) -> None:
    """Its page, `show`, its error and `resume` name the run before; they told of a new start."""
    at = ["--storage", "store"]
    typed(folder, "train", "failing", "-p", "checkpoint.every_steps=10", *at, status=2)
    (first,) = list_runs(folder / "store")["run_id"]
    seldom = ["-p", "checkpoint.every_s=null", "-p", "checkpoint.every_steps=1000"]
    _, said = typed(folder, "resume", "latest", *seldom, *at, status=2)
    assert f'to continue: resume_from="{first}"' in said
    second = list_runs(folder / "store")["run_id"][0]
    assert f"prefect-torch-ddp resume {second}" in typed(folder, "show", second, *at)[0]
    page = (folder / "store" / "runs" / second / "report.html").read_text(encoding="utf-8")
    assert "to begin where it began" in page
    mended = (folder / f"{WORKLOAD}.py").read_text(encoding="utf-8")
    (folder / "failing.py").write_text(mended, encoding="utf-8")
    printed, _ = typed(folder, "resume", "latest", *at)
    assert "80 steps in 5 epochs" in printed
    third = list_runs(folder / "store")["run_id"][0]
    assert min(int(line.split(",")[0]) for line in csv_of(folder, third)) > 10


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_a_failed_training_prints_the_users_frames_and_exits_with_2(folder: Path) -> None:
    """The terminal shows no frame of torch, Prefect, Dask or this package, and where they are."""
    printed, said = typed(folder, "train", "failing", "--storage", "store", status=2)
    text = printed + said
    assert f'File "{folder}/failing.py"' in said
    assert "WARNING" in said, "of the first attempt"
    assert "site-packages" not in text
    assert str(ROOT / "prefect_torch_ddp") not in text
    assert "\\n" not in text, "no traceback whose ends of lines are escaped"
    last = said[said.rindex("prefect-torch-ddp: ") :]
    assert SAYS in last
    assert last.count("\n") <= 12
    (whole,) = re.findall(r"^the whole traceback: (.+)$", last, re.MULTILINE)
    (file,) = (folder / "store").glob(str(Path(whole).relative_to(folder / "store")))
    assert "site-packages/torch" in file.read_text(encoding="utf-8")
    (report,) = re.findall(r"^the report: (.+)$", last, re.MULTILINE)
    assert Path(report).exists()
    assert last.splitlines()[-1].startswith("the report: ")


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_prints_a_ranks_error_without_others_frames(folder: Path, script: str) -> None:
    """Of torch, Prefect, Dask and this package, at any level; nor does the log, in 25 lines."""
    (folder / "script.py").write_text(script, encoding="utf-8")
    _, said = ran(folder, "script.py", status=1)
    log, _, shown = said.partition(
        'Traceback (most recent call last):\n  File "' + str(folder / "script.py")
    )
    assert f'File "{folder}/failing.py"' in shown
    assert SAYS in shown
    assert "site-packages" not in said
    assert str(ROOT / "prefect_torch_ddp") not in said
    assert "The above exception" not in said
    assert "\\n" not in log, "no traceback whose ends of lines are escaped"
    if "store" in script:
        assert "the whole traceback: " in shown
        assert "the report: " in shown
    assert sum(" | INFO " not in line for line in log.splitlines()) <= MAX_LINES
    assert shown.count("\n") <= MAX_LINES


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_a_script_that_every_rank_would_run_again_is_refused(folder: Path) -> None:
    """Ranks that import it would each call the flow, whose ranks would import it."""
    with (folder / f"{WORKLOAD}.py").open("a", encoding="utf-8") as script:
        script.write("\nfrom prefect_torch_ddp import TrainParams, train_flow\n")
        script.write(f"train_flow(TrainParams(workload='{WORKLOAD}', storage='store'))\n")
    _, said = ran(folder, f"{WORKLOAD}.py", status=1)
    assert "write the call below `if __name__ ==" in said
    assert "attempt 2" not in said
    assert said.count("\n") <= MAX_LINES


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["train", WORKLOAD, "-o", "epoch=3"], "there is no option epoch; did you mean epochs?"),
        (["train", WORKLOAD, "-p", "sed=3"], "there is no option sed; did you mean seed?"),
        (
            ["train", WORKLOAD, "-p", "world_size=3"],
            "can't be given: use --world-size",
        ),
        (["train", f"{WORKLOAD}.py"], f"give its module's: {WORKLOAD}"),
        (["train", "nowhere"], "no module nowhere"),
        (["run-script", "nowhere.py"], "there is no script nowhere.py"),
        (["show", "calm-otter"], "there is no run in"),
    ],
)
def test_what_cannot_work_is_refused_before_a_server_starts(
    folder: Path, given: list[str], says: str
) -> None:
    """One line says what to do, and nobody asks the server that PREFECT_API_URL names."""
    address = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}
    printed, said = typed(folder, *given, "--storage", "store", status=2, **address)
    assert not printed
    assert says in said
    assert said.count("\n") == 1
    assert not (folder / "store" / "run-records").exists()


def test_a_configured_server_that_does_not_answer_is_named(folder: Path) -> None:
    """The command names the server and doesn't replace it by another."""
    address = {"PREFECT_API_URL": "http://127.0.0.1:9/api"}
    _, said = typed(folder, "train", WORKLOAD, "--storage", "store", status=2, **address)
    assert "PREFECT_API_URL is http://127.0.0.1:9/api, but no Prefect server answers" in said


@pytest.mark.usefixtures("prefect_api")
def test_a_script_runs_with_torchruns_flags(folder: Path) -> None:
    """A script gets the arguments after `--`, and after a kill those to resume."""
    shutil.copy(str(torchrun_script.__file__), folder / "train.py")
    flags = ["--nproc-per-node", "2", "--max-restarts", "1", "--resume-arg=--resume"]
    script = ["train.py", "--", str(folder), "--lr", "0.3", "--die-at", "5"]
    typed(folder, "run-script", *flags, "--storage", "store", *script)
    assert (folder / "final.pt").exists()
    runs = list_runs(folder / "store")
    assert runs["state"].tolist() == ["completed"]
    assert runs["attempts"].tolist() == [2]
    assert runs["world_size"].tolist() == [2]


def test_a_script_without_a_home_for_prefect_is_told_so(folder: Path) -> None:
    """Prefect would start its server again and again, and log 200 lines each time."""
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    home = folder / "script.py" / "prefect"  # where not even root can make a folder
    _, said = ran(folder, "script.py", status=1, PREFECT_HOME=str(home))
    assert f"ServerError: Prefect's server can't keep its data in {home}: " in said
    assert "Set PREFECT_HOME to a folder" in said
    assert "site-packages/prefect/server" not in said
    assert said.count("\n") <= MAX_LINES
    assert not (folder / "store").exists()


def local(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the API of a local server of a folder's own, and what settings it takes."""
    port = free_port()
    home = {"PREFECT_HOME": str(folder / "home"), "PREFECT_SERVER_API_PORT": str(port)}
    return f"http://127.0.0.1:{port}/api", home


START = ("-m", "prefect_torch_ddp.server")
"""Starts or finds a server, as `make nightly` does."""


@pytest.mark.long
def test_commands_that_begin_at_once_start_one_server(tmp_path: Path) -> None:
    """Both started one: the pid on file was of the one that could not have the port.

    The server doesn't keep the lock, so a later command could start another after it has ended.
    """
    api, home = local(tmp_path)
    try:
        with ThreadPoolExecutor() as commands:
            begun = [commands.submit(ran, tmp_path, *START, **home) for _ in range(3)]
            done = [each.result() for each in begun]
        assert [printed.split() for printed, _ in done] == [[api]] * 3
        assert sum("Starting a local Prefect server" in said for _, said in done) == 1
        with (tmp_path / "home" / "server.lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ran(tmp_path, "-m", "prefect", "server", "stop", **home)
        wait_until(lambda: not is_prefect(api), HANG_S)
    finally:
        # Each of them, also one whose pid isn't on file.
        for process in psutil.process_iter(["environ", "cmdline"]):
            of_test = (process.info["environ"] or {}).get("PREFECT_HOME") == home["PREFECT_HOME"]
            if of_test and "server" in (process.info["cmdline"] or ()):
                process.kill()


@pytest.mark.long
def test_train_starts_a_server_and_what_comes_next_finds_it(folder: Path) -> None:
    """It outlives the process that started it, until the command that was named; leases are in
    files, and its UI finds its API at the port that Prefect's setting names."""
    api, home = local(folder)
    pid_file = folder / "home" / "server.pid"
    _, said = ran(folder, *START, status=1, PREFECT_HOME=f"{__file__}/prefect")
    assert "ServerError: Prefect's server can't keep its data in" in said
    with socket.create_server(("127.0.0.1", int(home["PREFECT_SERVER_API_PORT"]))):
        _, said = typed(folder, "train", WORKLOAD, status=2, **home)
        assert "is used by something that isn't a Prefect server" in said
        assert "`export PREFECT_SERVER_API_PORT=4201`, and run the command again" in said
        assert said.count("\n") <= 2
    try:
        _, said = typed(folder, "train", WORKLOAD, "--storage", "store", **home)
        assert said.count("Starting a local Prefect server") == 1
        assert "until `prefect server stop`" in said
        ends = [line.split(" - ", 1)[1] for line in said.splitlines()[-3:]]
        assert ends[0].startswith(f"the run in Prefect: {api.removesuffix('/api')}/runs/flow-run/")
        (report,) = (folder / "store").glob("runs/*/report.html")
        assert ends[1:] == [f"the report: {report}", "Finished in state Completed()"]
        printed, said = ran(folder, *START, **home)
        assert (printed.split(), said) == ([api], "")
        with urllib.request.urlopen(api.replace("/api", "/ui-settings")) as answer:
            assert json.load(answer)["api_url"] == api
        pid = int(pid_file.read_text())
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=" in environ
        ran(folder, "-m", "prefect", "server", "stop", **home)
        wait_until(lambda: not is_prefect(api), HANG_S)
    finally:
        if pid_file.exists():
            os.kill(int(pid_file.read_text()), signal.SIGTERM)
            wait_until(lambda: not is_prefect(api), HANG_S)


@pytest.mark.usefixtures("prefect_api")
def test_a_killed_run_that_nobody_closed_says_how_to_resume_it(tmp_path: Path) -> None:
    """`resume` said only to cancel it, which nobody would have noticed.

    The command that it names closes the flow run; then the run is resumed, here into a refusal of
    its workload, which isn't there.
    """
    with get_client(sync_client=True) as client:
        flow_run = client.create_flow_run(Flow(print, name="killed"), state=Running())
    killed = RECORD.model_copy(update={"flow_run_id": str(flow_run.id), "state": "training"})
    parameters = {"workload": "not.there", "storage": str(tmp_path)}
    write_run_record(
        DirectoryStorage(tmp_path), killed.model_copy(update={"parameters": parameters})
    )
    at = ["--storage", str(tmp_path)]
    _, refused = typed(tmp_path, "resume", killed.run_id, *at, status=2)
    assert f"its flow run {flow_run.id} is Running in Prefect" in refused
    (command,) = re.findall("`(.+)`", refused)
    name, *arguments = shlex.split(command)
    assert name == "prefect"
    prefect(*arguments)
    assert "not.there" in typed(tmp_path, "resume", killed.run_id, *at, status=2)[1]
