"""Watches let healthy programs live that look like hangs, and stacks tell them apart."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from distributed import Client

from prefect_torch_ddp import GangHungError, run_gang
from prefect_torch_ddp.data import table
from prefect_torch_ddp.data.datasets.dataset_store import staged
from prefect_torch_ddp.protocol.events import GangEvent, LogLine
from tests.support.gangs import RUN_WITH_CONTEXT, all_gone, own_cluster
from tests.support.separate_cluster import stop
from tests.support.waiting import HANG_S, wait_until
from tests.unit.data.tables.parquet_files import numbered
from tests.workloads import hanging, patient

pytestmark = pytest.mark.timeout(300)

LONGER_THAN_A_LOOK_S = 12.0
"""Ranks are looked at 3 s after a peer's end, 2 s later, and 8 s after that."""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Connect to a separate cluster: three workers of one thread."""
    with own_cluster(3) as (_, client):
        yield client


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    ["sleeping", "computing", "holding the lock", "messages", "barrier"],
)
@pytest.mark.parametrize(
    "seconds",
    [LONGER_THAN_A_LOOK_S, pytest.param(60.0, marks=pytest.mark.more)],
)
def test_rank_0_works_on_after_the_others_have_returned(
    client: Client, how: str, seconds: float
) -> None:
    """Rank 0 may write a report or upload, since nobody waits for anybody."""
    args = how, min(seconds, 30.0) if how == "holding the lock" else seconds
    assert run_gang(client, patient.works_on, args=args, world_size=2) == [how] * 2


@pytest.mark.extended
@pytest.mark.parametrize(
    "how", [pytest.param("sleeping", marks=pytest.mark.more), "in a C function", "messages"]
)
def test_rank_0_works_on_after_a_training_that_tracks(
    client: Client, tmp_path: Path, how: str
) -> None:
    """Rank 0 may work while the others wait at the end, and no system call is cut short."""
    call = hanging.config_in(tmp_path), patient.tracks_and_works_on, (how, LONGER_THAN_A_LOOK_S)
    values = run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2, progress_timeout_s=5.0)
    assert values == [4, 4]


@pytest.mark.extended
def test_a_forked_child_that_leaves_the_function_is_no_rank(client: Client) -> None:
    """The parent's heartbeat stays that of a rank in its function."""
    assert run_gang(client, patient.forks_a_child_that_returns, world_size=1) == ["FUNCTION"]


@pytest.mark.extended
def test_a_rank_at_a_breakpoint_is_left_alone(client: Client, tmp_path: Path) -> None:
    """The peers of a rank at a breakpoint wait in a collective for many times the limit."""
    call = hanging.config_in(tmp_path), patient.breakpoint_in_a_step, (10.0,)
    values = run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2, progress_timeout_s=1.0)
    assert values == [2, 2]


TRACER = """
import ctypes, os, sys, time
from pathlib import Path

pid, seconds, until = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17
threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()]
for each in threads:
    if ptrace(SEIZE, each, None, None):
        sys.exit(os.strerror(ctypes.get_errno()))
    assert ptrace(INTERRUPT, each, None, None) == 0
    os.waitpid(each, 0x40000000)  # __WALL
time.sleep(seconds)  # it is what is tested
until.touch()
for each in threads:
    assert ptrace(DETACH, each, None, None) == 0
"""


def test_a_rank_held_by_a_debugger_of_another_process_is_left_alone(
    client: Client, tmp_path: Path
) -> None:
    """A rank that is held as gdb holds one answers no look and gets no signal."""
    call = hanging.config_in(tmp_path), patient.held_by_a_tracer, (str(tmp_path),)
    with ThreadPoolExecutor(1) as pool:
        gang = pool.submit(
            run_gang, client, RUN_WITH_CONTEXT, args=call, world_size=2, progress_timeout_s=1.0
        )
        wait_until((tmp_path / "pid").exists)
        pid = (tmp_path / "pid").read_text()
        command = [sys.executable, "-c", TRACER, pid, "8", tmp_path / "goes on"]
        tracer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        (tmp_path / "goes on").touch()
        if "not permitted" in tracer.stderr:
            pytest.skip("this user may not attach a debugger to another process")
        assert (tracer.returncode, tracer.stderr) == (0, "")
        assert gang.result(60) == [3, 3]


def test_a_rank_that_receives_from_one_ahead_of_it_is_left_alone(
    client: Client, tmp_path: Path
) -> None:
    """The rank ahead may load its next batch for several limits before it sends."""
    call = hanging.config_in(tmp_path), patient.receives_from_a_rank_ahead, (6.0,)
    values = run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2, progress_timeout_s=1.0)
    assert values == [2, 2]


@pytest.mark.extended
def test_a_rank_that_waits_for_a_dataset_of_another_process_is_left_alone(
    client: Client, tmp_path: Path
) -> None:
    """Another process of the host may decode a table for many times the limit."""
    folder = numbered(tmp_path / "table", [30], 5)
    name = table(folder, local_copy=tmp_path / "other").folder.name
    copies = tmp_path / "copies"
    says = "waits until a dataset is on its host's disk: the gang keeps running"
    with ExitStack() as held:
        held.enter_context(staged(copies / ".staging", name, fcntl.LOCK_EX))

        def hear(event: GangEvent) -> None:
            if isinstance(event, LogLine) and says in event.text:
                held.close()

        call = {"args": (str(folder), str(copies)), "world_size": 2, "progress_timeout_s": 1.0}
        assert run_gang(client, patient.opens_a_copy, **call, on_event=hear) == [30, 30]
        assert not (copies / ".staging" / name).exists()


@pytest.mark.long
def test_a_loop_left_by_one_rank_is_over_after_the_plain_limit(
    client: Client, tmp_path: Path
) -> None:
    """Two looks prove that all ranks wait in collectives, so the plain limit holds."""
    call = hanging.config_in(tmp_path), patient.leaves_the_loop, ()
    began_s = time.monotonic()
    with pytest.raises(GangHungError, match=r"ctx.request_stop\(...\)") as caught:
        run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2, progress_timeout_s=8.0)
    assert time.monotonic() - began_s < 80.0, "not ten limits"
    assert caught.value.ranks == (0, 1)


@pytest.mark.extended
def test_who_sleeps_is_blamed_and_not_who_has_sent_more(client: Client, tmp_path: Path) -> None:
    """The sleeping rank is blamed, although torch counts messages as collectives."""
    call = hanging.config_in(tmp_path), patient.messages_to_a_sleeper, ()
    with pytest.raises(GangHungError, match=r"rank 0 on .* did not arrive") as caught:
        run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=3, progress_timeout_s=4.0)
    assert caught.value.ranks == (0,)


SLEEPY = """
import sys
from pathlib import Path
from distributed import Client, LocalCluster
from prefect_torch_ddp import run_gang
from tests.support.gangs import RUN_WITH_CONTEXT
from tests.unit.data.tables.parquet_files import numbered
from tests.workloads import hanging, patient

if __name__ == "__main__":
    folder, seconds = sys.argv[1], float(sys.argv[2])
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        call = hanging.config_in(Path(folder)), patient.steps_for, (seconds, folder)
        run_gang(client, RUN_WITH_CONTEXT, args=call, world_size=2, progress_timeout_s=3.0)
    print("ended well")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "asleep_s",
    [pytest.param(9.0, marks=pytest.mark.extended), pytest.param(120.0, marks=pytest.mark.more)],
)
def test_a_laptop_may_sleep(tmp_path: Path, asleep_s: float) -> None:
    """No watch counts the time in which all processes are stopped."""
    (tmp_path / "sleepy.py").write_text(SLEEPY, encoding="utf-8")
    command = [sys.executable, tmp_path / "sleepy.py", tmp_path, str(asleep_s + 8.0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        wait_until((tmp_path / "moves").exists)
        everything = psutil.Process(caller.pid)
        processes = [everything, *everything.children(recursive=True)]
        for each in processes:
            each.send_signal(signal.SIGSTOP)
        time.sleep(asleep_s)  # it is what is tested
        for each in processes:
            each.send_signal(signal.SIGCONT)
        said, _ = caller.communicate(timeout=120)
    assert "ended well" in said


LONG_SLEEP = """
import os, sys
from distributed import Client
from prefect_torch_ddp import local_cluster

if __name__ == "__main__":
    with local_cluster(n_workers=2) as cluster, Client(cluster) as client:
        print(*client.run(os.getpid).values(), flush=True)
        sys.stdin.read()
"""
TTL_S = 8
"""A worker whose last heartbeat is older is restarted by Dask, which looks as often."""


@pytest.mark.long
def test_the_workers_of_a_local_cluster_outlive_a_long_sleep(tmp_path: Path) -> None:
    """After a sleep that is longer than Dask's worker-ttl, only a silent worker is restarted.

    Dask restarted all workers at once: its timer ran before it read their heartbeats.
    """
    (tmp_path / "sleepy.py").write_text(LONG_SLEEP, encoding="utf-8")
    given = {
        "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": f"{TTL_S} s",
        "DASK_PREFECT_TORCH_DDP__LIVENESS_TIMEOUT_S": "1",
    }
    pipe = subprocess.PIPE
    command = [sys.executable, tmp_path / "sleepy.py"]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env=os.environ | given
    ) as caller:
        try:
            assert caller.stdout is not None
            healthy, silent = (psutil.Process(int(pid)) for pid in caller.stdout.readline().split())
            everything = psutil.Process(caller.pid)
            processes = [everything, *everything.children(recursive=True)]
            for each in processes:
                each.send_signal(signal.SIGSTOP)
            time.sleep(TTL_S + 2.0)  # it is what is tested
            for each in processes:
                if each != silent:
                    each.send_signal(signal.SIGCONT)
            wait_until(lambda: all_gone([silent]))
            assert not all_gone([healthy])
        except BaseException:
            caller.kill()
            raise
        caller.communicate(timeout=HANG_S)
    assert caller.returncode == 0


WAITS = """
import sys, threading, time
from distributed import Client, LocalCluster
from prefect_torch_ddp import run_gang
from prefect_torch_ddp.tasks.watch.task_watch import TaskWatch

def flow(client, limit_s):
    future = client.submit(int)
    watch = TaskWatch(client, future, owns_workers=False, workers_timeout_s=limit_s)
    while not future.done():
        watch.look()
        print(time.monotonic(), flush=True)
        time.sleep(0.5)
    return [future.result()]

def gang(client, limit_s):
    says = lambda event: print(time.monotonic(), flush=True)
    return run_gang(client, int, world_size=1, workers_timeout_s=limit_s, on_event=says)

def come(cluster):
    sys.stdin.readline()
    cluster.scale(1)

if __name__ == "__main__":
    given = {"n_workers": 0, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(processes=False, **given) as cluster, Client(cluster) as client:
        threading.Thread(target=come, args=[cluster], daemon=True).start()
        print(globals()[sys.argv[1]](client, float(sys.argv[2])), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("who", ["gang", "flow"])
def test_time_in_which_the_waiting_process_is_stopped_is_no_wait_for_workers(
    who: str, tmp_path: Path
) -> None:
    """As when its terminal suspends it: a worker that comes after it continues is in time."""
    limit_s = 12.0
    (tmp_path / "waits.py").write_text(WAITS, encoding="utf-8")
    pipe = subprocess.PIPE
    command = [sys.executable, tmp_path / "waits.py", who, str(limit_s)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as caller:
        try:
            assert caller.stdout is not None
            assert caller.stdout.readline(), "it waits"
            stop(psutil.Process(caller.pid))
            time.sleep(limit_s + 1)  # it is what is tested
            continued_s = time.monotonic()
            caller.send_signal(signal.SIGCONT)
            says = iter(caller.stdout.readline, "")
            assert any(float(waited_s) > continued_s for waited_s in says), "it waits on"
            said = caller.communicate("come\n", timeout=HANG_S)[0].splitlines()
            assert said[-1] == "[0]"
        except BaseException:
            caller.kill()
            raise
    assert caller.returncode == 0
