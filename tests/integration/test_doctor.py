"""The installed doctor finds what is wrong, and a gang refuses it too."""

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
from distributed import Client

from prefect_torch_ddp import VersionConflictError, run_gang
from prefect_torch_ddp.doctor.on_worker import unreachable
from tests.support.separate_cluster import separate_cluster
from tests.support.servers import prefect_server_in
from tests.support.waiting import HANG_S, wait_until

HOME = os.environ["PTD_TEST_HOME"]
"""Where the storage is that the doctor checks by default."""


def doctor(*options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a terminal as wide as most."""
    command = shutil.which("prefect-torch-ddp", path=sysconfig.get_path("scripts"))
    assert command is not None, "install the package again: pip install --editable ."
    return subprocess.run(
        [command, "doctor", *options],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**os.environ, "HOME": HOME, "COLUMNS": "100", **environment},
    )


@pytest.mark.extended
def test_nothing_is_wrong(tmp_path: Path) -> None:
    """By default the doctor starts a local cluster, tries a gang and the storage, and cleans up."""
    done = doctor("--storage", str(tmp_path / "store"))
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        f"torch {metadata.version('torch')}",
        "all 2 workers can connect to each other",
        "a gang of 2 ranks connected by gloo",
        "honours conditional writes",
        "nothing is wrong",
    ):
        assert said in " ".join(done.stdout.split())
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert "Traceback" not in done.stderr


def test_few_open_files_and_what_somebody_lacks(dask_client: Client) -> None:
    """Workers with few open files are named, and so are packages that a worker lacks."""

    def limit_files(soft: int) -> int:
        before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return before

    def forget() -> str:
        from prefect_torch_ddp.gang.versions import versions

        return versions().pop("prefect")

    def remember(version: str) -> None:
        from prefect_torch_ddp.gang.versions import versions

        versions()["prefect"] = version

    limits = dask_client.run(limit_files, 1024)
    (version, *_) = dask_client.run(forget).values()
    try:
        done = doctor("--cluster", dask_client.scheduler.address)
    finally:
        dask_client.run(remember, version)
        for worker, limit in limits.items():
            dask_client.run(limit_files, limit, workers=[worker])
    assert done.returncode == 1
    assert "2 problems" in done.stdout
    assert "may open only 1024 files" in done.stdout
    assert "no prefect on tcp://127.0.0.1" in " ".join(done.stdout.split())


@pytest.mark.extended
def test_workers_that_cant_write_and_a_gang_that_was_not_tried(tmp_path: Path) -> None:
    """Workers that can read the storage but not write it are named, and so is what isn't tried."""
    began, enough = tmp_path / "began", tmp_path / "enough"

    def wait() -> None:
        began.touch()
        while not enough.exists():
            time.sleep(0.05)

    with (
        tempfile.TemporaryDirectory() as store,  # which everybody can get at, unlike tmp_path
        separate_cluster(tmp_path / "cluster", 1) as running,
        Client(running.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        Path(store).chmod(0o755)
        busy = pool.submit(run_gang, client, wait, world_size=1, name="busy")
        try:
            wait_until(began.exists, what="a rank")
            usual = doctor("--cluster", running.address, "--storage", store)
            client.run(os.seteuid, 65534)
            others = doctor("--cluster", running.address, "--storage", store)
        finally:
            client.run(os.seteuid, 0)
            enough.touch()
            busy.result(HANG_S)
    for done in (usual, others):
        assert "not tried: a gang, since workers are busy:" in " ".join(done.stdout.split())
    assert usual.returncode == 0, usual.stdout + usual.stderr
    assert "nothing is wrong with what was tried" in usual.stdout
    assert others.returncode == 1
    assert f"can't write to {store}: " in " ".join(others.stdout.split())


def test_who_is_not_reached() -> None:
    """A worker at a port where nobody listens is named with the reason."""
    with socket.create_server(("127.0.0.1", 0)) as listens, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        found = asyncio.run(
            unreachable({"tcp://a": listens.getsockname(), "tcp://b": bound.getsockname()})
        )
    assert list(found) == ["tcp://b"]
    assert "refused" in found["tcp://b"]


def test_no_scheduler_no_storage() -> None:
    """The doctor lists all problems at once."""
    done = doctor("--cluster", "tcp://127.0.0.1:9", "--storage", "gs://models", "--limit-s", "2")
    assert done.returncode == 1
    assert "2 problems" in done.stdout
    assert "tcp://127.0.0.1:9" in done.stdout
    assert "s3://bucket/prefix" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_scheduler_of_tls_without_certificates_and_a_block_without_a_server() -> None:
    """Dask raises a TypeError for the one, Prefect its own errors for the other."""
    given = ("--cluster", "tls://127.0.0.1:9", "--storage", "s3-bucket/models", "--limit-s", "2")
    done = doctor(*given, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "no scheduler answers at tls://127.0.0.1:9: TypeError: TLS expects" in said
    assert "storage s3-bucket/models can't be opened: " in said
    assert "Traceback" not in done.stderr


@pytest.mark.extended
def test_a_prefect_server_that_forgets_leases_is_named(
    tmp_path: Path, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its restart would crash deployed runs; one that keeps leases in files isn't named, and one
    that doesn't answer wasn't tried."""

    def said() -> str:
        return " ".join(doctor("--cluster", "tcp://127.0.0.1:9", "--limit-s", "2").stdout.split())

    forgets = "a restart of the Prefect server would crash deployed runs"
    assert prefect_api
    assert forgets not in said()
    with monkeypatch.context() as patch:
        in_memory = "prefect.server.concurrency.lease_storage.memory"
        patch.setenv("PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE", in_memory)
        with prefect_server_in(tmp_path) as url:
            patch.setenv("PREFECT_API_URL", url)
            found = said()
    assert forgets in found
    assert "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE=prefect.server.concurrency.lease" in found
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert "not tried: the Prefect server of PREFECT_API_URL: " in said()


@pytest.mark.extended
def test_versions_that_conflict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with another version of the package is named, and a gang refuses it."""
    other = tmp_path / "other" / "prefect_torch_ddp-99.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: prefect-torch-ddp\nVersion: 99.0\n"
    )
    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patched:
            patched.setenv("PYTHONPATH", str(other.parent), prepend=os.pathsep)
            running = stack.enter_context(separate_cluster(tmp_path / "cluster", 1))
        done = doctor("--cluster", running.address)
        assert done.returncode == 1
        said = " ".join(done.stdout.split())
        assert f"99.0 on {running.address.rpartition(':')[0]}" in said
        assert "prefect-torch-ddp differs" in said
        with (
            Client(running.address) as client,
            pytest.raises(VersionConflictError, match=r"here.*99\.0 on tcp"),
        ):
            run_gang(client, "os:getpid", world_size=1)


SLURM = """
cluster_class: dask_jobqueue.SLURMCluster
cluster_kwargs:
  n_workers: 4
  cores: 8
  memory: 32GB
  queue: batch
  interface: lo
  job_extra_directives: [--signal=B:USR1@120]
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        (SLURM, 1, ["#SBATCH -p batch", "--signal=B:USR1@120", "there is no sbatch here"]),
        (SLURM.replace("lo\n", "nowhere0\n"), 1, ["refuses the file", "'nowhere0' is not a valid"]),
        (SLURM.replace(" queue", " qeue"), 1, ["unexpected keyword argument 'qeue'"]),
        (SLURM.replace("SLURM", "SLRM"), 1, ["'dask_jobqueue.SLRMCluster' can't be imported"]),
        (SLURM.replace("cluster_kwargs", "kwargs"), 2, ["there is no option kwargs; did you"]),
        ("- a list", 2, ["has no fields"]),
        ("cluster_class: [", 2, ["can't be read"]),
    ],
    ids=["fine", "interface", "argument", "class", "name", "a list", "no YAML"],
)
def test_a_batch_systems_file_is_looked_at_without_a_job(
    tmp_path: Path, text: str, status: int, says: list[str]
) -> None:
    """The doctor shows the job script, and names what is wrong with it or the machine."""
    file = tmp_path / "slurm.yaml"
    file.write_text(text, encoding="utf-8")
    command = shutil.which("prefect-torch-ddp", path=sysconfig.get_path("scripts"))
    assert command is not None
    # No batch system, whatever this machine has.
    path = {"PATH": f"{Path(sys.executable).parent}"}
    done = subprocess.run(
        [command, "doctor", "--cluster-file", str(file)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**os.environ, **path, "COLUMNS": "200"},
    )
    assert done.returncode == status, done.stdout + done.stderr
    for said in says:
        assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
