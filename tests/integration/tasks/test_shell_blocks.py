"""Every shell block of README.md and deployments/README.md runs unchanged, on a Prefect
server with Debian's Postgres."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_torch_ddp import S3Storage
from prefect_torch_ddp.tasks.report.artifacts import key
from prefect_torch_ddp.tasks.train_run import run_id_of
from tests.integration.data.image_files import write_images
from tests.support.blocks import save_block
from tests.support.ports import free_port
from tests.support.runs import artifacts_of
from tests.support.s3_server import S3Server
from tests.support.servers import prefect_server_in
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
BLOCKS = {
    page: re.findall(
        r"^```bash\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    for page in ("deployments/README.md", "README.md")
}
INSTALLS = re.compile(r"pip install\b")
"""It would replace the checkout that all tests run in; test_wheel.py installs the package."""
STAYS = re.compile(r"(prefect worker start|python -m flows\.deployed)\b")


@pytest.fixture
def postgres() -> Iterator[str]:
    """Run Postgres with a separate database; give the server's connection URL. Postgres
    refuses to run as root; Debian's package comes with a user for it."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        pytest.skip("no Postgres here: apt-get install postgresql, or make system-packages")
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    folder = Path(tempfile.mkdtemp(prefix="ptd-postgres-"))
    if as_user:
        shutil.chown(folder, "postgres")
    data, port, log = folder / "data", free_port(), folder / "log"
    prepare = [found[-1] / "initdb", "--auth=trust", "--username=prefect", "--no-sync", data]
    subprocess.run([*as_user, *prepare], check=True, capture_output=True, cwd=folder)
    listen = ["-p", str(port), "-c", "listen_addresses=127.0.0.1", "-k", folder]
    command = [*as_user, found[-1] / "postgres", "-D", data, *listen]
    with log.open("wb") as out:
        server = subprocess.Popen(command, stderr=out, cwd=folder)
    try:
        wait_until(lambda: "ready to accept connections" in log.read_text(), what="Postgres")
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
    finally:
        # A fast shutdown: it doesn't wait for clients.
        os.kill(int((data / "postmaster.pid").read_text().split()[0]), signal.SIGINT)
        server.wait(60)
        shutil.rmtree(folder)


@contextmanager
def running(line: str, log: Path) -> Iterator[None]:
    """Run a command that stays in the foreground of its terminal; end it by Ctrl-C."""
    with log.open("wb") as out:
        process = subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=ROOT, stdout=out, stderr=out)
        try:
            yield
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def run_block(block: str, terminals: ExitStack, folder: Path) -> str:
    """Run a block in one shell; what stays in the foreground gets a terminal that is left open."""
    lines = [line for line in block.splitlines() if not INSTALLS.match(line)]
    for number, line in enumerate(filter(STAYS.match, lines)):
        terminals.enter_context(running(line, folder / f"{len(lines)}-{number}.log"))
    script = "set -e\n" + "\n".join(line for line in lines if not STAYS.match(line))
    # `make train`, `test` and `nightly` are what installs and calls this: their recipes are shown.
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={**os.environ, "MAKEFLAGS": "-n"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    logs = "".join(log.read_text(errors="replace")[-6000:] for log in folder.glob("*.log"))
    assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}{done.stderr[-3000:]}{logs}"
    return done.stdout


def served_run(client: SyncPrefectClient, folder: Path) -> None:
    """Have a process that serves the deployments work a run off."""

    def served() -> list[DeploymentResponse]:
        return [each for each in client.read_deployments() if each.name.endswith("-laptop")]

    wait_until(lambda: len(served()) == 6, what="six deployments")
    assert {each.work_pool_name for each in served()} == {None}
    deployment = client.read_deployment_by_name("train-ddp/digits-laptop")
    params = {"storage": str(folder / "store"), "options": {"epochs": 1}}
    run = client.create_flow_run_from_deployment(deployment.id, parameters={"params": params})
    wait_until(lambda: bool(client.read_flow_run(run.id).end_time), what="its end", timeout_s=200)
    assert client.read_flow_run(run.id).state.is_completed()


def asked_for(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the runs that no schedule made."""
    return [run for run in client.read_flow_runs() if not run.auto_scheduled]


def check_nightly(client: SyncPrefectClient) -> None:
    """The run has its three artifacts, and the schedule has made runs for the next nights."""
    nightly = client.read_deployment_by_name("train-ddp/nightly")
    runs = [run for run in client.read_flow_runs() if run.deployment_id == nightly.id]
    done = next(run for run in runs if run.state_name == "Completed")
    experiment = "train-ddp/nightly/prefect_torch_ddp.examples.digits"
    assert artifacts_of(done.id).keys() == {
        key(kind, experiment) for kind in ("report", "progress", "runs")
    }
    (scheduled, *_) = (run for run in runs if run.auto_scheduled)
    assert scheduled.parameters.keys() == {"params"}


def check_evaluations(client: SyncPrefectClient, trained: list[FlowRun]) -> None:
    """Check that the automation evaluated checkpoints of these runs, using only their records."""

    def evaluations() -> list[FlowRun]:
        return [run for run in asked_for(client) if "checkpoint" in run.parameters]

    def states() -> set[str | None]:
        return {run.state_name for run in evaluations()}

    # While one runs, others are passed over.
    ended = ({"Completed"}, {"Completed", "Cancelled"})
    wait_until(lambda: states() in ended, what="the end of all evaluations", timeout_s=300)
    evaluated = {run.parameters["checkpoint"].rpartition("/runs/")[2] for run in evaluations()}
    assert evaluated <= {run_id_of(run.name, run.id) for run in trained}


def test_every_shell_block_runs(
    postgres: str, chain_s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block ends well in its order, and the runs that it starts complete."""
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", postgres)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))  # whose storage is the default one
    (tmp_path / "server").mkdir()
    storage = chain_s3_server.storage("aerial")
    assert isinstance(storage, S3Storage)
    write_images(storage, ["beach", "forest"], 6)
    with (
        prefect_server_in(tmp_path / "server") as url,
        temporary_settings({PREFECT_API_URL: url}),
        get_client(sync_client=True) as client,
        ExitStack() as terminals,
    ):
        monkeypatch.setenv("PREFECT_API_URL", url)
        save_block("aerial", chain_s3_server, folder="aerial")
        said = ""
        for page, blocks in BLOCKS.items():
            assert blocks, page
            for block in blocks:
                if "flows.deployed" in block:
                    with ExitStack() as laptop:
                        run_block(block, laptop, tmp_path)
                        served_run(client, tmp_path)
                else:
                    said += run_block(block, terminals, tmp_path)
        assert said.count("Completed") >= 4, said
        by_hand = [run for run in asked_for(client) if "params" in run.parameters]
        assert {run.state_name for run in by_hand} == {"Completed"}, by_hand
        check_nightly(client)
        check_evaluations(client, by_hand)
    assert not [*tmp_path.glob("server/*.db")]  # all of it is in Postgres
