"""A gang that fails is started again within the same call, on the same warm helpers, with as
many ranks as there are workers."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from distributed import Client, LocalCluster

from prefect_torch_ddp import (
    InvalidParamsError,
    NotEnoughWorkersError,
    RankFailedError,
    WorkerLostError,
    run_gang,
)
from prefect_torch_ddp.gang import run as launch
from prefect_torch_ddp.protocol.events import AttemptBegan, GangEvent, LogLine
from tests.integration.gang.test_failures import pids_in
from tests.workloads import restarting

pytestmark = pytest.mark.timeout(120)


def attempts_in(events: list[GangEvent]) -> list[tuple[int, int]]:
    """Return number and size of each attempt."""
    return [
        (event.attempt, event.world_size) for event in events if isinstance(event, AttemptBegan)
    ]


@contextlib.contextmanager
def extra_worker(cluster: LocalCluster, num_workers: int) -> Iterator[psutil.Process]:
    """Join a worker without a nanny to a cluster: once killed it never comes back."""
    command = [
        sys.executable,
        "-m",
        "dask",
        "worker",
        cluster.scheduler_address,
        "--no-nanny",
        "--nthreads",
        "1",
    ]
    process = subprocess.Popen(
        [*command, "--no-dashboard"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with Client(cluster) as client:
            client.wait_for_workers(num_workers, timeout=60)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def test_a_killed_rank_is_started_again_on_warm_hosts(dask_client: Client, tmp_path: Path) -> None:
    """Rank 1 is killed in attempt 1: attempt 2 runs in the same call, forked by the same
    helpers, counted as torchrun does."""
    events: list[GangEvent] = []
    args = ([1], "SIGKILL", str(tmp_path))
    values = run_gang(
        dask_client,
        restarting.fail_in,
        args=args,
        world_size=2,
        max_restarts=2,
        on_event=events.append,
    )
    assert [value["total"] for value in values] == [2.0, 2.0]
    assert {(v["TORCHELASTIC_RESTART_COUNT"], v["TORCHELASTIC_MAX_RESTARTS"]) for v in values} == {
        ("1", "2")
    }
    assert attempts_in(events) == [(1, 2), (2, 2)]
    parents = {
        attempt: {(tmp_path / f"{attempt}-{rank}").read_text() for rank in range(2)}
        for attempt in (1, 2)
    }
    assert parents[1] == parents[2]
    said = [event.text for event in events if isinstance(event, LogLine) and event.rank == -1]
    assert any(
        "rank 1 on 127.0.0.1 failed in attempt 1: was killed by SIGKILL (9)" in text
        for text in said
    )
    assert any("restart 1 of 2" in text for text in said)


def test_restarts_are_used_up(dask_client: Client, tmp_path: Path) -> None:
    """After the last restart the failure is the caller's, with the number of its attempt;
    without any, of the first."""
    args = ([1, 2, 3, 4], "SIGKILL", str(tmp_path))
    with pytest.raises(
        RankFailedError, match=r"rank 1 on 127\.0\.0\.1 failed in attempt 3: was killed"
    ) as caught:
        run_gang(dask_client, restarting.fail_in, args=args, world_size=2, max_restarts=2)
    assert caught.value.why_final is None
    with pytest.raises(RankFailedError, match="failed in attempt 1"):
        run_gang(dask_client, restarting.fail_in, args=args, world_size=2)


def test_an_import_error_is_not_tried_again(dask_client: Client, tmp_path: Path) -> None:
    """It would come back at every attempt; the error says so."""
    args = ([1], "ImportError", str(tmp_path))
    with pytest.raises(
        RankFailedError, match="not tried again: a failure by ModuleNotFoundError comes back"
    ) as caught:
        run_gang(dask_client, restarting.fail_in, args=args, world_size=2, max_restarts=3)
    assert caught.value.attempt == 1
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("how", ["OSError", "ValueError"])
def test_an_error_that_may_pass_is_tried_again(
    dask_client: Client, tmp_path: Path, how: str
) -> None:
    """An OSError may always pass; so may the same exception of a plain function, whose steps
    nobody knows."""
    args = ([1, 2], how, str(tmp_path))
    values = run_gang(dask_client, restarting.fail_in, args=args, world_size=2, max_restarts=3)
    assert [value["value"] for value in values] == [3, 3]


def test_arguments_may_be_made_for_each_attempt(dask_client: Client, tmp_path: Path) -> None:
    """Given as a function they are made anew: here each attempt is told which attempts are to
    fail."""

    def arguments(attempt: int) -> tuple[object, ...]:
        return [attempt] if attempt == 1 else [], "SIGKILL", str(tmp_path)

    values = run_gang(dask_client, restarting.fail_in, args=arguments, world_size=2, max_restarts=1)
    assert [value["value"] for value in values] == [2, 2]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"min_world_size": 0}, "min_world_size is 0"),
        ({"min_world_size": 3}, "min_world_size is 3 and world_size 2"),
    ],
)
def test_counts_that_cannot_be_are_refused(
    dask_client: Client, options: dict[str, int], says: str
) -> None:
    """Each names the value and what to give."""
    with pytest.raises(InvalidParamsError, match=says):
        run_gang(dask_client, restarting.fail_everywhere, world_size=2, **options)


def kill_when_all_hold(folder: Path, num_ranks: int, victim: Callable[[], int]) -> threading.Thread:
    """Kill a process as soon as all ranks of the first attempt hold."""

    def work() -> None:
        pids_in(folder, num_ranks)
        os.kill(victim(), signal.SIGKILL)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_worker_lost_for_good_leaves_a_smaller_gang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With min_world_size=1 the gang goes on with one rank; without it there are too few
    workers, because of the loss."""
    monkeypatch.setattr(launch, "FULL_SIZE_S", 1.0)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        for fewest in (1, None):
            folder = tmp_path / str(fewest)
            folder.mkdir()
            events: list[GangEvent] = []
            with extra_worker(cluster, 2) as worker:
                thread = kill_when_all_hold(folder, 2, lambda pid=worker.pid: pid)  # type: ignore[misc]
                options = {
                    "max_restarts": 1,
                    "min_world_size": fewest,
                    "on_event": events.append,
                    "workers_timeout_s": 3.0,
                }
                if fewest:
                    assert run_gang(
                        client,
                        restarting.hold_in_first,
                        args=(str(folder),),
                        world_size=2,
                        **options,
                    ) == [1]
                    assert attempts_in(events) == [(1, 2), (2, 1)]
                else:
                    with pytest.raises(NotEnoughWorkersError, match="have 1, need 2") as caught:
                        run_gang(
                            client,
                            restarting.hold_in_first,
                            args=(str(folder),),
                            world_size=2,
                            **options,
                        )
                    assert isinstance(caught.value.__cause__, WorkerLostError)
                thread.join()


def test_a_worker_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    """Its nanny starts the killed worker anew, within the wait: the gang has its full size
    again, though fewer would do."""
    events: list[GangEvent] = []
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        pids = client.run(os.getpid)
        thread = kill_when_all_hold(tmp_path, 2, lambda: max(pids.items())[1])
        options = {"max_restarts": 1, "min_world_size": 1, "on_event": events.append}
        assert run_gang(
            client, restarting.hold_in_first, args=(str(tmp_path),), world_size=2, **options
        ) == [2, 2]
        assert attempts_in(events) == [(1, 2), (2, 2)]
        thread.join()


def test_a_world_size_left_open_stays_what_it_was(tmp_path: Path) -> None:
    """world_size=None takes all workers, and a restart as many as the first attempt had, though
    there are more by then."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        events: list[GangEvent] = []

        def grow_then_kill() -> None:
            pids_in(tmp_path, 1)
            cluster.scale(2)
            client.wait_for_workers(2, timeout=60)
            os.kill(rank_pid(tmp_path), signal.SIGKILL)

        thread = threading.Thread(target=grow_then_kill)
        thread.start()
        options = {"max_restarts": 1, "on_event": events.append}
        assert run_gang(client, restarting.hold_in_first, args=(str(tmp_path),), **options) == [1]
        assert attempts_in(events) == [(1, 1), (2, 1)]
        thread.join()


def rank_pid(folder: Path) -> int:
    """Return the pid of the one rank: the child of the helper whose pid is in the folder."""
    (child,) = psutil.Process(int((folder / "0").read_text())).children()
    return child.pid


def test_equal_failures_are_named_together(
    dask_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank raises the same: one line with all of them, and nobody is a consequence."""
    from prefect_torch_ddp.gang.caller import root_cause

    monkeypatch.setattr(root_cause, "IDENTICAL_S", 60.0)  # ends as soon as all ranks have failed
    with pytest.raises(
        RankFailedError, match=r"ranks 0, 1 on 127\.0\.0\.1 failed in attempt 1: ValueError: bad lr"
    ) as caught:
        run_gang(dask_client, restarting.fail_everywhere, world_size=2)
    assert "as a consequence" not in str(caught.value)
