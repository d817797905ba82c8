"""When a rank fails: one error that names the right rank, nothing left behind, and the next
gang works."""

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from distributed import Client, LocalCluster

from prefect_torch_ddp import (
    GangCancelledError,
    NotEnoughWorkersError,
    RankFailedError,
    WorkerLostError,
    run_gang,
)
from tests.workloads import faulty, odd, plain

pytestmark = pytest.mark.timeout(120)


def wait_until(true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def pids_in(folder: Path, num_ranks: int, timeout_s: float = 30) -> list[int]:
    """Wait until all ranks have written their pids and return them."""
    wait_until(
        lambda: len([path for path in folder.iterdir() if path.name.isdigit()]) == num_ranks,
        timeout_s,
    )
    return [int((folder / str(rank)).read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("how", "says", "fields"),
    [
        ("raise", "ValueError: the user's own words", {"cause": ValueError}),
        ("slow_finally", "ValueError: the user's own words", {"cause": ValueError}),
        ("slow_after_leaving", "ValueError: the user's own words", {"cause": ValueError}),
        ("collective_in_finally", "the user's own words", {}),
        ("raise_timeout", "TimeoutError: the user's own timeout", {"cause": TimeoutError}),
        ("raise_awkward", "AwkwardError: won't unpickle \\(3\\)", {"cause": None}),
        ("memory", "MemoryError", {"cause": MemoryError}),
        ("interrupt", "KeyboardInterrupt", {"cause": None}),
        ("sys_exit", r"left by sys.exit\(3\)", {"exit_code": 3, "cause": None}),
        ("os_exit", "left with exit code 3 before its function returned", {"exit_code": 3}),
        ("return", "its function had already returned while rank 0 waited for it", {}),
        ("SIGKILL", r"killed by SIGKILL \(9\)", {"signal": 9}),
        ("SIGSEGV", r"killed by SIGSEGV \(11\)", {"signal": 11}),
    ],
)
def test_the_right_rank_is_blamed(
    dask_client: Client, how: str, says: str, fields: dict[str, object]
) -> None:
    """E4: rank 1 fails while rank 0 waits for it in a collective; the error names rank 1, its
    host, the attempt and the cause."""
    with pytest.raises(RankFailedError, match=says) as caught:
        run_gang(dask_client, faulty.only_on, args=(1, how), world_size=2, attempt=2)
    error = caught.value
    assert (error.rank, error.attempt, error.host) == (1, 2, "127.0.0.1")
    assert not isinstance(error, TimeoutError)
    assert str(error).startswith("rank 1 on 127.0.0.1 failed in attempt 2: ")
    for name in ("exit_code", "signal"):
        if name in fields:
            assert getattr(error, name) == fields[name]
    if "cause" in fields:
        expected = fields["cause"]
        assert error.__cause__ is None if expected is None else type(error.__cause__) is expected
    if how.startswith("SIG"):
        assert error.failure.stderr_tail[-1] == "last words"
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert type(again.__cause__) is type(error.__cause__)


@pytest.mark.parametrize("code", [0, None])
def test_leaving_by_exit_0_is_a_failure(dask_client: Client, code: int | None) -> None:
    """`sys.exit(0)` of one rank while others train is a failure with a name."""
    with pytest.raises(RankFailedError, match=rf"rank 1 .*left by sys.exit\({code}\)"):
        run_gang(dask_client, faulty.only_on, args=(1, "sys_exit", code), world_size=2)


def test_the_next_gang_works_after_a_failed_one(dask_client: Client) -> None:
    """A9: after a failed gang the same cluster runs the next."""
    with pytest.raises(RankFailedError):
        run_gang(dask_client, faulty.only_on, args=(0, "raise"), world_size=2)
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


def test_unpicklable_value_names_rank_and_type(dask_client: Client) -> None:
    """A value that doesn't pickle is an error that names rank and type."""
    with pytest.raises(
        RankFailedError, match=r"rank 1 returned a value of type _thread.lock that can't be pickled"
    ):
        run_gang(dask_client, faulty.unpicklable_value, world_size=2)


def test_module_that_is_missing_at_the_rank(dask_client: Client) -> None:
    """An import string that leads nowhere is the ranks' ImportError."""
    with pytest.raises(RankFailedError, match="No module named 'no_such_module'"):
        run_gang(dask_client, "no_such_module:fn", world_size=2)


def test_lost_worker(tmp_path: Path) -> None:
    """SIGKILL of a Dask worker: its ranks die with it, and the error names the worker and its
    ranks."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        victim = client.run(os.getpid)
        errors: list[BaseException] = []

        def run() -> None:
            try:
                run_gang(client, faulty.sleep_for_ever, args=(str(tmp_path),), world_size=2)
            except WorkerLostError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        ranks = pids_in(tmp_path, 2)
        address, pid = sorted(victim.items())[1]
        os.kill(pid, signal.SIGKILL)
        thread.join(30)
        assert [type(error) for error in errors] == [WorkerLostError]
        assert address in str(errors[0])
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks))
        assert run_gang(client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


def test_a_worker_lost_with_its_values() -> None:
    """SIGKILL of a Dask worker after its rank returned, before its value was fetched: an error,
    no endless wait or second run."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        with pytest.raises(
            WorkerLostError, match="after its ranks had returned, with their values"
        ):
            run_gang(client, odd.kill_worker_at_exit, world_size=1)
        assert run_gang(client, plain.sum_of_ones, world_size=1) == [1.0]


def test_client_cancel_ends_the_gang(dask_client: Client, tmp_path: Path) -> None:
    """A9: cancelled by its Dask keys from outside: GangCancelledError or WorkerLostError, ranks
    gone, the next gang works."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            run_gang(dask_client, faulty.sleep_for_ever, args=(str(tmp_path),), world_size=2)
        except GangCancelledError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    ranks = pids_in(tmp_path, 2)
    agents = [
        future for future in dask_client.futures.values() if future.key.startswith("ddp-agent-")
    ]
    assert len(agents) == 2
    from distributed import Future

    dask_client.cancel([Future(agent.key, dask_client) for agent in agents], force=True)
    thread.join(30)
    assert [type(error) for error in errors] == [GangCancelledError]
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks))
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]


def _call_gang(address: str, folder: str) -> None:
    with Client(address) as client:
        run_gang(client, faulty.sleep_for_ever, args=(folder,), world_size=2)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_death_of_the_caller(dask_client: Client, tmp_path: Path, how: signal.Signals) -> None:
    """Ctrl-C, SIGTERM or SIGKILL of the caller: ranks gone within 10 s, the next gang starts
    within 10 s more."""
    address = dask_client.scheduler.address
    caller = multiprocessing.get_context("spawn").Process(
        target=_call_gang, args=(address, str(tmp_path))
    )
    caller.start()
    ranks = pids_in(tmp_path, 2)
    assert caller.pid is not None
    os.kill(caller.pid, how)
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), 10)
    started = time.monotonic()
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2) == [2.0, 2.0]
    assert time.monotonic() - started < 10
    caller.join(20)
    assert caller.exitcode not in (None, 0)


def test_busy_workers_are_waited_for_and_named(dask_client: Client, tmp_path: Path) -> None:
    """Two limits: the workers exist but are busy with another gang; the refusal says with
    whom."""
    caller = multiprocessing.get_context("spawn").Process(
        target=_call_gang, args=(dask_client.scheduler.address, str(tmp_path))
    )
    caller.start()
    pids_in(tmp_path, 2)
    with pytest.raises(NotEnoughWorkersError, match="busy with gang 'sleep_for_ever'"):
        run_gang(dask_client, plain.sum_of_ones, world_size=2, queue_timeout_s=1.5)
    assert caller.pid is not None
    os.kill(caller.pid, signal.SIGKILL)
    caller.join(20)
    assert run_gang(dask_client, plain.sum_of_ones, world_size=2, queue_timeout_s=30) == [2.0, 2.0]
