"""The warm fork server: ranks are forked from one helper per Dask worker, and are all the same
what a fresh process would be."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client, LocalCluster

from prefect_torch_ddp import RankFailedError, run_gang
from prefect_torch_ddp.errors import ForkServerUnavailableError
from prefect_torch_ddp.gang.worker.fork_client import ForkServer
from prefect_torch_ddp.protocol.rank import RankFiles
from tests.support.waiting import wait_until
from tests.workloads import plain

pytestmark = pytest.mark.timeout(120)


def hosts() -> list[psutil.Process]:
    """Return the living fork servers below this process."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name() == "ddp-fork-server"
    ]


def look_around() -> dict[str, Any]:
    """Describe the rank's process."""
    import random

    import numpy as np
    import torch

    return {
        "parent": psutil.Process().parent().name(),  # type: ignore[union-attr]
        "name": psutil.Process().name(),
        "leads_session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "sockets": sum(fd.is_socket() for fd in Path("/proc/self/fd").iterdir()),
        "random": (random.random(), float(np.random.random()), int(torch.initial_seed())),
        "threads": torch.get_num_threads(),
        "folder": str(Path.cwd()),
        "cuda": torch.cuda.is_initialized(),
        "ddp_is_quick": "torch._dynamo" in sys.modules,
    }


def test_ranks_are_forked_and_look_fresh(dask_client: Client) -> None:
    """Own session, own random state, the worker's folder and threads, no file of the host's,
    CUDA untouched."""
    zero, one = run_gang(dask_client, look_around, world_size=2, process_group="none")
    folders = dask_client.run(os.getcwd)
    for rank, seen in enumerate((zero, one)):
        assert (seen["parent"], seen["name"]) == ("ddp-fork-server", f"ddp-rank-{rank}")
        assert seen["leads_session"]
        assert not seen["cuda"]
        assert seen["folder"] in folders.values()
        assert seen["threads"] == 1
        assert seen["sockets"] <= (2 if rank == 0 else 1), (
            "the events' socket, and on rank 0 the store's"
        )
    siblings = run_gang(
        dask_client, look_around, world_size=4, ranks_per_worker=2, process_group="none"
    )
    for generator in range(3):
        assert len({seen["random"][generator] for seen in (zero, one, *siblings)}) == 6


def test_an_idle_host_loads_what_ddp_imports(dask_client: Client) -> None:
    """DDP's constructor imports torch._dynamo, for more than a second of each rank: a host does
    it ahead, when there is time."""
    run_gang(dask_client, look_around, world_size=2, process_group="none")
    deadline = time.monotonic() + 60
    while not all(
        seen["ddp_is_quick"]
        for seen in run_gang(dask_client, look_around, world_size=2, process_group="none")
    ):
        assert time.monotonic() < deadline
        time.sleep(3)  # a lull


def test_exec_launcher_starts_fresh_processes(dask_client: Client) -> None:
    """`launcher="exec"` is the same contract without the host."""
    zero, one = run_gang(dask_client, look_around, world_size=2, launcher="exec")
    assert "ddp-fork-server" not in (zero["parent"], one["parent"])
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2, launcher="exec") == [2.0, 2.0]


def test_a_rank_sees_the_users_current_code(
    dask_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module edited between two gangs is read anew, though the host stays warm."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_between_gangs.py"
    for answer in (1, 22):
        module.write_text(f"def answer():\n    return {answer}\n")
        assert run_gang(dask_client, "edited_between_gangs:answer", world_size=1) == [answer]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_host_is_replaced(dask_client: Client, how: signal.Signals) -> None:
    """The next gang starts a new host where one died."""
    run_gang(dask_client, plain.sum_of_ones, world_size=2)
    old = hosts()
    assert old
    for host in old:
        host.send_signal(how)
    wait_until(
        lambda: not any(host.is_running() and host.status() != psutil.STATUS_ZOMBIE for host in old)
    )
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


@pytest.mark.parametrize(
    "close",
    [lambda cluster: None, lambda cluster: os.kill(cluster.workers[0].process.pid, signal.SIGKILL)],
)
def test_hosts_end_with_their_worker(close: Callable[[LocalCluster], None]) -> None:
    """A worker that closes, or is killed, takes its host along."""
    before = set(hosts())
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        run_gang(client, plain.sum_of_ones, world_size=1)
        (host,) = set(hosts()) - before
        close(cluster)
    wait_until(lambda: not host.is_running())


def open_files(pid: int) -> dict[int, tuple[str, int, int]]:
    """Return what each open file descriptor of a process is: its kind, and by which numbers the
    kernel knows the file."""
    found = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found[int(fd.name)] = (
                str(fd.readlink()).partition(":")[0],
                fd.stat().st_dev,
                fd.stat().st_ino,
            )
    return found


def test_a_rank_has_no_file_of_its_siblings_or_of_the_host(dask_client: Client) -> None:
    """Ranks forked one after the other from one host share nothing but /dev/null, and its link
    is closed in them."""

    def look() -> tuple[dict[int, tuple[str, int, int]], dict[int, tuple[str, int, int]]]:
        return open_files(os.getpid()), open_files(os.getppid())

    ranks = run_gang(dask_client, look, world_size=4, ranks_per_worker=2, process_group="none")
    for rank, (mine, of_host) in enumerate(ranks):
        assert {0, 1, 2} <= mine.keys()
        kept = {file for file in mine.values() if file[0] != "/dev/null"}
        assert not kept & set(of_host.values())
        for other, (its, _) in enumerate(ranks):
            assert other == rank or not kept & set(its.values()), f"rank {rank} and rank {other}"
        streams = sorted(
            kind for fd, (kind, _, _) in mine.items() if fd > 2 and kind in ("pipe", "socket")
        )
        assert streams == ["pipe", "socket", *["socket"] * (rank == 0)], (
            "the control pipe, the events' socket, rank 0's store"
        )


def alive(pids: Sequence[int]) -> list[int]:
    """Return those that still run."""
    return [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_dataloader_workers_die_with_their_rank(
    dask_client: Client, tmp_path: Path, context: str
) -> None:
    """A rank that is killed while its DataLoader works takes the loader's workers along,
    however they were started."""

    def load_and_die(folder: str) -> None:
        from torch.utils.data import DataLoader

        from tests.workloads.squares import Squares

        loader = iter(
            DataLoader(Squares(1000), batch_size=2, num_workers=2, multiprocessing_context=context)
        )
        next(loader)
        pids = [child.pid for child in psutil.Process().children(recursive=True)]
        Path(folder, "pids").write_text(" ".join(map(str, pids)))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailedError, match="SIGKILL"):
        run_gang(dask_client, load_and_die, args=(str(tmp_path),), world_size=1)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 2
    wait_until(lambda: not alive(pids))


def test_daemons_of_a_rank_end_with_its_gang(dask_client: Client, tmp_path: Path) -> None:
    """What a rank started in sessions of their own, some steps away, is gone when the caller
    hears that the gang is over."""

    def start_daemons(folder: str, *, fail: bool) -> None:
        # A session of its own, in it a shell that starts a further session and ends: that one
        # is nobody's child but the host's.
        script = 'echo $$ >> "$0"; setsid sh -c \'echo $$ >> "$0"; exec sleep 600\' "$0" & setsid sleep 600 & sleep 600'
        pids = Path(folder, "daemons")
        subprocess.Popen(
            ["setsid", "sh", "-c", script, str(pids)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        if fail:
            msg = "told to fail"
            raise ValueError(msg)

    for fail in (False, True):
        folder = tmp_path / str(fail)
        folder.mkdir()
        if fail:
            with pytest.raises(RankFailedError, match="told to fail"):
                run_gang(
                    dask_client,
                    start_daemons,
                    args=(str(folder),),
                    kwargs={"fail": fail},
                    world_size=1,
                )
        else:
            run_gang(
                dask_client, start_daemons, args=(str(folder),), kwargs={"fail": fail}, world_size=1
            )
        assert not alive([int(pid) for pid in (folder / "daemons").read_text().split()])
        assert not [
            process
            for process in psutil.Process().children(recursive=True)
            if process.name() == "sleep"
        ]


def test_a_stopped_host_costs_seconds_and_is_replaced() -> None:
    """A gang whose host was stopped gets fresh processes; a host that stops under its rank
    doesn't hide how that ended."""

    def stop_the_host_and_leave() -> None:
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(3)

    before = set(hosts())
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        assert run_gang(client, plain.sum_of_ones, world_size=1) == [1.0]
        (stopped,) = set(hosts()) - before
        stopped.suspend()
        parent = run_gang(client, look_around, world_size=1)[0]["parent"]
        assert parent != "ddp-fork-server"
        wait_until(lambda: not stopped.is_running())
        with pytest.raises(RankFailedError, match="exit code 3"):
            run_gang(client, stop_the_host_and_leave, world_size=1)
        assert run_gang(client, look_around, world_size=1)[0]["parent"] == "ddp-fork-server", (
            "a new one"
        )


def test_each_fork_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that got a second thread after it was ready refuses to fork, and says why."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, threading\n"
        "def start(*_):\n"
        "    threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "signal.signal(signal.SIGUSR1, start)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    host = ForkServer()
    try:
        host.wait_until_ready()
        os.kill(host.pid, signal.SIGUSR1)
        wait_until(lambda: psutil.Process(host.pid).num_threads() == 2)
        with Path(os.devnull).open("r+b") as nothing:
            fd = nothing.fileno()
            with pytest.raises(ForkServerUnavailableError, match="it runs 2 threads"):
                host.fork(
                    RankFiles(
                        launch=fd,
                        events=fd,
                        outcome=fd,
                        control=fd,
                        heartbeat=fd,
                        stdout=fd,
                        stderr=fd,
                    )
                )
        assert host.is_alive
    finally:
        host.close()


def test_nested_processes_die_with_their_rank(dask_client: Client, tmp_path: Path) -> None:
    """What a rank started in its session is gone when its gang is."""

    def start_and_fail(folder: str) -> None:
        child = subprocess.Popen(["sleep", "600"])
        Path(folder, os.environ["RANK"]).write_text(str(child.pid))
        msg = "told to fail"
        raise ValueError(msg)

    with pytest.raises(Exception, match="told to fail"):
        run_gang(dask_client, start_and_fail, args=(str(tmp_path),), world_size=1)
    pid = int((tmp_path / "0").read_text())
    wait_until(lambda: not alive([pid]))
