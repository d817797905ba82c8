"""docs/security.md holds: encrypted clusters, strangers at every socket, secrets that don't
leak."""

import itertools
import os
import pickle
import socket
import sqlite3
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import Client
from distributed.security import Security

from prefect_torch_ddp import ClusterParams, TrainParams, run_gang, train_flow
from prefect_torch_ddp.doctor.command import examine
from tests.support.blocks import FOLDER, save_block
from tests.support.gangs import pids_in
from tests.support.s3_server import S3Server
from tests.support.separate_cluster import SeparateCluster, separate_cluster
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import plain

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("prefect_api")]

TLS = {
    "ca-file": "tls_ca_file",
    "client.cert": "tls_client_cert",
    "client.key": "tls_client_key",
    "scheduler.cert": "tls_scheduler_cert",
    "scheduler.key": "tls_scheduler_key",
    "worker.cert": "tls_worker_cert",
    "worker.key": "tls_worker_key",
}
"""Dask's settings below distributed.comm.tls, and the fields of its Security."""


WORKER_SECRETS = {
    "PREFECT_API_KEY": "hunter2-of-prefect",
    "PREFECT_API_AUTH_STRING": "admin:hunter2-of-the-server",
}
"""In the environment of the Dask workers, which talk to Prefect."""


@pytest.fixture(scope="module")
def tls_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeparateCluster]:
    """Run scheduler and workers with certificates from files, as Dask's configuration of these
    processes names them."""
    folder = tmp_path_factory.mktemp("tls")
    made, settings = Security.temporary(), {"distributed.comm.require-encryption": True}
    for setting, field in TLS.items():
        (folder / field).write_text(getattr(made, field))
        settings[f"distributed.comm.tls.{setting}"] = str(folder / field)
    with pytest.MonkeyPatch.context() as patch, dask.config.set(settings):
        for name, value in settings.items():
            variable = name.replace(".", "__").replace("-", "_").upper()
            patch.setenv(f"DASK_{variable}", str(value))
        for name, value in WORKER_SECRETS.items():
            patch.setenv(name, value)
        with separate_cluster(folder / "cluster") as cluster:
            yield cluster


@pytest.mark.long
def test_a_cluster_with_certificates_from_dasks_configuration(
    tls_cluster: SeparateCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gang, a run and the doctor need only a tls:// address; strangers get no connection."""
    address, storage = tls_cluster.address, str(tmp_path / "store")
    assert address.startswith("tls://")
    with Client(address) as client:
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]
    at = ClusterParams(address=address)
    done = train_flow(TrainParams(workload="tests.workloads.tiny", storage=storage, cluster=at))
    assert (done.training.world_size, done.evaluation.num_samples) == (2, 21)
    examine(address, storage)
    assert "all 2 workers can connect to each other" in " ".join(capsys.readouterr().out.split())
    other = Security.temporary()
    keys = {"tls_client_cert": other.tls_client_cert, "tls_client_key": other.tls_client_key}
    for to, security in (
        (address, Security(**keys)),  # it knows the cluster's authority, and isn't known to it
        (address.replace("tls:", "tcp:"), Security(require_encryption=False)),
    ):
        with pytest.raises(OSError, match=r"Timed out|in <"):
            Client(to, security=security, timeout=2)


class Bomb:
    """Makes a folder when somebody unpickles it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


def payloads(folder: Path) -> Iterator[bytes]:
    """Yield what strangers say: noise, a scan, lengths without end, pickles in the frames of
    Dask's comms, of torch's store and of gloo."""
    bomb = pickle.dumps(Bomb(folder))
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield bytes(range(256)) * 256
    yield struct.pack("<Q", 2**62) + bomb
    yield bomb
    yield struct.pack("<QQQ", 2, len(bomb), 0) + bomb  # Dask: number of frames, their lengths
    hello, name = b"\0" + struct.pack("<I", 0x3C85F7CE), b"default_pg/0//cpu//0/0"
    key = struct.pack("<Q", len(name)) + name
    yield hello + b"\x01" + key + struct.pack("<Q", len(bomb)) + bomb  # the store's SET
    yield hello + b"\x01" + struct.pack("<Q", 2**62) + bomb
    for number in range(8):  # gloo's number of a pair
        yield struct.pack("<Q", number) + bomb


def test_a_stranger_at_every_socket(tls_cluster: SeparateCluster, tmp_path: Path) -> None:
    """Nothing that arrives at a port or a key of the store is run, and the gang ends as usual."""
    folder, ran = tmp_path / "gang", tmp_path / "ran"
    folder.mkdir()
    with (
        ThreadPoolExecutor(1) as pool,
        Client(tls_cluster.address) as client,
        ExitStack() as connections,
    ):
        call = {"args": (str(folder),), "world_size": 2, "progress_timeout_s": 60.0}
        gang = pool.submit(run_gang, client, plain.meet_until, **call)
        try:
            ranks = {psutil.Process(pid) for pid in pids_in(folder, 2, of=gang)}
            found = {each: ports_of(each) for each in tls_cluster.processes()}
            assert ranks <= found.keys()
            assert all(found[rank] for rank in ranks), "gloo's, and the store's on rank 0"
            everywhere = set().union(*found.values())
            assert {host for host, _ in everywhere} == {"127.0.0.1"}
            for at, said in itertools.product(everywhere, payloads(ran)):
                stranger = connections.enter_context(socket.create_connection(at, HANG_S))
                with suppress(OSError):  # it hung up on us
                    stranger.sendall(said)
            spoil_store(int((folder / "port").read_text()), pickle.dumps(Bomb(ran)))
        finally:
            (folder / "enough").touch()
        assert gang.result(HANG_S) == [2.0, 2.0]
    assert not ran.exists()
    pickle.loads(pickle.dumps(Bomb(ran)))
    assert ran.exists(), "it would have"


def spoil_store(port: int, said: bytes) -> None:
    """Put something else under each key of a store, as torch's own client does, unasked."""
    import torch.distributed as dist

    own = {"is_master": False, "wait_for_workers": False}
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=HANG_S), **own)
    keys = store.list_keys()
    assert keys, "it lets everybody in"
    for key in keys:
        store.set(key, said)
    assert {store.get(key) for key in keys} == {said}


def ports_of(process: psutil.Process) -> set[tuple[str, int]]:
    """Return the ports and addresses at which a process listens."""
    return {
        (each.laddr.ip.removeprefix("::ffff:"), each.laddr.port)
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }


FILES = ("/manifest.json", "/model.json", "run-records/", "/logs/", "/worker-", "/prefect/storage/")


def files_in(folder: Path) -> set[Path]:
    """Return the files below a folder."""
    return {path for path in folder.rglob("*") if path.is_file()}


def rows_in(database: Path) -> dict[str, str]:
    """Return what the Prefect server has in its database, by table and column."""
    found = dict[str, str]()
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'"):
            rows = connection.execute(f'SELECT * FROM "{table}"')
            columns = [f"{table}.{column[0]}" for column in rows.description]
            values = zip(*rows, strict=True)
            found |= {c: "\n".join(map(str, v)) for c, v in zip(columns, values, strict=False)}
    return found


def look_at_processes(folder: Path, cluster: SeparateCluster) -> tuple[str, str]:
    """Let a training of `tiny:Steered` end once it is in its second attempt; return the command
    lines and the ranks' environments there were."""
    try:
        wait_until(lambda: (folder / "step").exists() and int((folder / "step").read_text()) > 3)
        ranks = [psutil.Process(pid) for pid in pids_in(folder, 2)]
        everyone = {*cluster.processes(), *psutil.Process().children(recursive=True)}
        lines = (" ".join(each.cmdline()) for each in everyone)
        environments = [Path(f"/proc/{rank.pid}/environ").read_text() for rank in ranks]
        assert all("PTD_TEST_SESSION" in each for each in environments)
        return "\n".join(lines), "\n".join(environments)
    finally:
        (folder / "enough").touch()


def test_a_secret_is_nowhere(
    tls_cluster: SeparateCluster,
    s3_server: S3Server,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No secret is in the database, storage, results, logs, command lines or ranks of a run."""
    in_options = {name: f"hunter2-{name}" for name in ("password", "url", "listed", "data")}
    secrets = {**in_options, **WORKER_SECRETS, "HF_TOKEN": "hunter2-of-the-caller"}
    secrets["block"] = s3_server.keys["owner"][1]
    for name in ("HF_TOKEN", *WORKER_SECRETS):
        monkeypatch.setenv(name, secrets[name])
    folder, home = tmp_path_factory.mktemp("gang"), Path(os.environ["PREFECT_HOME"])
    before = files_in(home)
    params = TrainParams(
        workload="tests.workloads.tiny:Steered",
        storage=save_block("canary", s3_server),
        cluster=ClusterParams(address=tls_cluster.address),
        options={
            "folder": str(folder),
            "fault": {"how": "raise", "rank": 1, "step": 3, "attempts": [1]},
            "db": {"password": secrets["password"], "api_keys": [secrets["listed"]]},
            "proxy": f"http://me:{secrets['url']}@proxy:3128",
        },
        data_options={"access_token": secrets["data"]},
        max_restarts=0,
        retry_delay_s=0,
    )
    with ThreadPoolExecutor(1) as pool:
        looked = pool.submit(look_at_processes, folder, tls_cluster)
        report = train_flow(params)
    called_with, environments = looked.result()
    assert len(report.training.failures) == 1

    storage, printed = s3_server.storage(FOLDER), capfd.readouterr()
    found = {
        "report": report.model_dump_json(),
        "printed": printed.out + printed.err,
        "command lines": called_with,
        "ranks' environment": environments,
        **{f"s3://{each.key}": storage.read(each.key).decode("latin-1") for each in storage.list()},
        **rows_in(next(tmp_path_factory.getbasetemp().glob("prefect-server*/prefect.db"))),
    }
    for path in (files_in(home) - before) | files_in(tls_cluster.folder):
        found[str(path)] = path.read_text("latin-1")
    named = {place for place, text in found.items() if report.run_id in text}
    for kind in ("artifact.data", "log.message", "events.payload", "task_run_state.data", *FILES):
        assert any(kind in place for place in named), "we do look where the run is"
    leaks = {
        (place, name)
        for (place, text), (name, secret) in itertools.product(found.items(), secrets.items())
        if secret in text
    }
    assert leaks == {("flow_run.parameters", name) for name in in_options}
