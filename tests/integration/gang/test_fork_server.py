"""Ranks that are forked from a worker's fork server are like fresh processes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client

from prefect_torch_ddp import RankFailedError, run_gang
from prefect_torch_ddp.errors import ForkServerUnavailableError
from prefect_torch_ddp.gang.worker import fork_client
from prefect_torch_ddp.gang.worker.fork_client import ForkServer
from prefect_torch_ddp.protocol.rank import Preload, RankFiles
from tests.support.gangs import alive, all_gone, own_cluster, workers_of
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import failing, plain

NAME = "ddp-fork-server"


def servers() -> list[psutil.Process]:
    """Return the living fork servers below this process."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if process.name() == NAME]


def look_around() -> dict[str, Any]:
    """Describe the rank's process."""
    import random

    import numpy as np
    import torch

    return {
        "parent": psutil.Process().parent().name(),  # type: ignore[union-attr]
        "name": psutil.Process().name(),
        "arguments": sys.argv[1:],
        "signals": [str(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGINT)],
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "leads_session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "random": (random.random(), float(np.random.random()), int(torch.initial_seed())),
        "threads": torch.get_num_threads(),
        "folder": str(Path.cwd()),
        "cuda": torch.cuda.is_initialized(),
        "ddp_is_quick": "torch._dynamo" in sys.modules,
    }


@pytest.mark.long
def test_ranks_are_forked_and_look_fresh(dask_client: Client) -> None:
    """Forked and executed ranks have the same session, random state, folder and threads."""
    ranks = run_gang(dask_client, look_around, world_size=2, process_group="none")
    folders = dask_client.run(os.getcwd).values()
    for number, seen in enumerate(ranks):
        assert (seen["parent"], seen["name"]) == (NAME, f"ddp-rank-{number}")
        assert (seen["arguments"], seen["threads"], seen["cuda"]) == ([], 1, False)
        assert seen["ddp_is_quick"], "DDP's constructor would import torch._dynamo for a second"
        assert seen["leads_session"]
        assert seen["folder"] in folders
    call = {"world_size": 4, "ranks_per_worker": 2, "process_group": "none"}
    ranks += run_gang(dask_client, look_around, **call)
    for generator in range(3):
        assert len({seen["random"][generator] for seen in ranks}) == len(ranks)
    fresh = run_gang(dask_client, look_around, world_size=2, launcher="exec")
    assert NAME not in {seen["parent"] for seen in fresh}
    assert [seen["arguments"] for seen in fresh] == [[], []]
    for seen in ranks:
        for part in ("signals", "blocked"):
            assert seen[part] == fresh[0][part]
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2, launcher="exec") == [2.0, 2.0]


def test_a_rank_sees_the_users_current_code(
    dask_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module edited between two gangs is read again, though the fork server stays."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_between_gangs.py"
    for answer in (1, 22):
        module.write_text(f"def answer():\n    return {answer}\n", encoding="utf-8")
        assert run_gang(dask_client, "edited_between_gangs:answer", world_size=1) == [answer]


@pytest.mark.extended
def test_a_killed_server_is_replaced(dask_client: Client) -> None:
    """The next gang starts a new fork server after one has died."""
    run_gang(dask_client, plain.sum_of_ones, world_size=2)
    one, *others = servers()
    one.kill()
    for other in others:
        other.kill()
    wait_until(lambda: all_gone([one, *others]))
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


def open_files(pid: int) -> dict[int, tuple[str, int, int]]:
    """Return the kind of each open file of a process, and the kernel's numbers for it."""
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            kind = str(fd.readlink()).partition(":")[0]
            found[int(fd.name)] = (kind, fd.stat().st_dev, fd.stat().st_ino)
    return found


def test_a_rank_has_no_file_of_its_siblings_or_of_the_server(dask_client: Client) -> None:
    """Ranks forked one after the other share only /dev/null."""

    def look() -> tuple[dict[int, tuple[str, int, int]], dict[int, tuple[str, int, int]]]:
        return open_files(os.getpid()), open_files(os.getppid())

    ranks = run_gang(dask_client, look, world_size=4, ranks_per_worker=2, process_group="none")
    for rank, (mine, of_server) in enumerate(ranks):
        assert {0, 1, 2} <= mine.keys()
        kept = {file for file in mine.values() if file[0] != "/dev/null"}
        assert not kept & set(of_server.values())
        for other, (its, _) in enumerate(ranks):
            assert other == rank or not kept & set(its.values()), f"rank {rank} and rank {other}"


@pytest.mark.extended
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_dataloader_workers_die_with_their_rank(
    dask_client: Client, tmp_path: Path, context: str
) -> None:
    """A rank that is killed while its DataLoader works takes the loader's workers along."""

    def load_and_die(folder: str) -> None:
        from torch.utils.data import DataLoader

        from tests.workloads.plain import Squares

        squares: Any = Squares(1000)
        loader = DataLoader(squares, batch_size=2, num_workers=2, multiprocessing_context=context)
        batches = iter(loader)
        next(batches)
        pids = [child.pid for child in psutil.Process().children(recursive=True)]
        Path(folder, "pids").write_text(" ".join(map(str, pids)), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_gang(dask_client, load_and_die, args=(str(tmp_path),), world_size=1)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 2
    wait_until(lambda: not alive(pids))


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_rank_started_ends_with_its_gang(
    dask_client: Client, tmp_path: Path, *, fails: bool
) -> None:
    """Processes of a rank, in its session and in others, are gone when the caller hears the end."""

    def start_processes(folder: str, *, fails: bool) -> None:
        # A session of its own, in it a shell that starts a further session and ends: that one
        # is nobody's child but the fork server's.
        shell = 'echo $$ >> "$0"; setsid sh -c \'echo $$ >> "$0"; exec sleep 600\' "$0"'
        script = f"{shell} & setsid sleep 600 & sleep 600"
        pids = Path(folder, "pids")
        nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(["setsid", "sh", "-c", script, str(pids)], **nowhere)
        child = subprocess.Popen(["sleep", "600"])
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        with pids.open("a") as file:
            file.write(f"{child.pid}\n")
        if fails:
            msg = "told to fail"
            raise ValueError(msg)

    call: dict[str, Any] = {"args": (str(tmp_path),), "kwargs": {"fails": fails}, "world_size": 1}
    fail = pytest.raises(RankFailedError, match="told to fail")
    with fail if fails else contextlib.nullcontext():
        run_gang(dask_client, start_processes, **call)
    assert not alive(map(int, (tmp_path / "pids").read_text().split()))
    below = psutil.Process().children(recursive=True)
    assert not [process for process in below if process.name() == "sleep"]


@pytest.mark.long
def test_a_stopped_server_costs_seconds_and_is_replaced() -> None:
    """A gang gets fresh processes if the server is stopped, and exit codes stay visible."""

    def stop_the_server_and_leave() -> None:
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(3)

    def name_of_parent() -> str:
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip()

    before = set(servers())
    with own_cluster(1) as (_, client):
        assert run_gang(client, name_of_parent, world_size=1) == [NAME]
        (stopped,) = set(servers()) - before
        stopped.suspend()
        assert run_gang(client, name_of_parent, world_size=1) != [NAME]
        wait_until(lambda: not stopped.is_running())
        with pytest.raises(RankFailedError, match="exit code 3"):
            run_gang(client, stop_the_server_and_leave, world_size=1)
        assert run_gang(client, name_of_parent, world_size=1) == [NAME]


def test_a_server_that_its_worker_ends_as_it_loads_is_ended_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the thread that closes the worker, or by the one that loads: a second time, its
    descriptors may be another's."""
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    before = set(servers())
    for number in range(20):
        client = fork_client.ForkClient(f"tcp://worker-{number}")
        client.warm_up(Preload())
        wait_until(lambda client=client: client._server is not None)
        client.end()
        for thread in threading.enumerate():
            if thread.name == "prefect-torch-ddp-warm":
                thread.join(HANG_S)
                assert not thread.is_alive()
        assert client.ready(Preload()) is None
    assert not raised
    assert not caplog.records
    assert set(servers()) == before


def test_a_server_that_has_ranks_is_given_up_late_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks end with their server: a rank forked before isn't to blame for its SIGKILL, and one
    started afresh would find no peers."""
    monkeypatch.setattr(fork_client, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(fork_client, "WITH_RANKS_TIMEOUT_S", 2.0)
    server = ForkServer.start()
    with contextlib.closing(server), Path(os.devnull).open("r+b") as nothing:
        server.wait_until_ready()
        files = RankFiles(*[nothing.fileno()] * 7)
        assert isinstance(server.fork(files).reap(), int)
        with contextlib.closing(server.fork(files)):  # nobody has asked how it ended
            os.kill(server.pid, signal.SIGSTOP)
            began_s = time.monotonic()
            says = "the fork server did not answer: .*; the ranks of this worker"
            with pytest.raises(OSError, match=says):
                server.fork(files)
            assert time.monotonic() - began_s >= 2
        assert not server.is_alive


def test_each_fork_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a second thread refuses to fork, and says why."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, threading\n"
        "def start(*_):\n"
        "    signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "signal.signal(signal.SIGUSR1, start)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    server = ForkServer.start()

    def has_second_thread() -> bool:
        # Python handles a signal that comes just before its wait for orders only after it.
        os.kill(server.pid, signal.SIGUSR1)
        return psutil.Process(server.pid).num_threads() == 2

    with contextlib.closing(server), Path(os.devnull).open("r+b") as nothing:
        server.wait_until_ready()
        wait_until(has_second_thread)
        with pytest.raises(ForkServerUnavailableError, match="it runs 2 threads"):
            server.fork(RankFiles(*[nothing.fileno()] * 7))
        assert server.is_alive


@pytest.mark.parametrize(
    "signals", [pytest.param((), marks=pytest.mark.extended), (signal.SIGTERM, signal.SIGINT)]
)
def test_a_server_that_still_loads_dies_with_its_worker(signals: tuple[int, ...]) -> None:
    """A loading server ends with its worker, also after signals to all processes."""
    begin = "from prefect_torch_ddp.gang.worker.fork_client import ForkServer"
    show = "server = ForkServer.start(); print(server.pid, flush=True); input()"
    command, pipe = [sys.executable, "-c", f"{begin}; {show}"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as worker:
        assert worker.stdout is not None
        server = psutil.Process(int(worker.stdout.readline()))
        if signals:
            wait_until(lambda: server.name() == NAME)
        for each in signals:
            server.send_signal(each)
        assert server.is_running()
        worker.kill()
    wait_until(lambda: all_gone([server]))


@pytest.mark.extended
def test_a_system_without_pidfd_open_starts_fresh_processes() -> None:
    """On an old kernel or in a sandbox gangs run, fail and end as usual, without forks."""

    def forbid() -> None:
        from prefect_torch_ddp.gang.worker.child import has_pidfd

        def refuse(_pid: int) -> int:
            raise PermissionError(1, "Operation not permitted")

        os.pidfd_open = refuse
        has_pidfd.cache_clear()

    call = {"world_size": 2, "ranks_per_worker": 2}
    with own_cluster(1) as (_, client):
        client.run(forbid)
        ranks = run_gang(client, look_around, **call)
        assert NAME not in {seen["parent"] for seen in ranks}
        with pytest.raises(RankFailedError, match="SIGKILL"):
            run_gang(client, failing.only_on, args=(1, "SIGKILL"), **call)
        assert not any(worker.children() for worker in workers_of(client).values())
