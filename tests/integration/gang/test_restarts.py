"""A gang that fails is started again within the same call, on the same warm fork servers."""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from distributed import Client, LocalCluster

from prefect_torch_ddp import (
    NotEnoughWorkersError,
    RankFailedError,
    WorkerLostError,
    run_gang,
)
from prefect_torch_ddp.gang import restarts
from prefect_torch_ddp.gang.caller.verdict import root_cause
from prefect_torch_ddp.protocol.events import GangEvent, LogLine, Waiting
from tests.support.gangs import (
    alive,
    attempts_in,
    call_releasable_gang,
    extra_worker,
    own_cluster,
    pids_in,
)
from tests.support.waiting import HANG_S, wait_until
from tests.workloads import failing


def test_a_killed_rank_is_started_again_on_warm_hosts(dask_client: Client, tmp_path: Path) -> None:
    """Attempt 2 runs in the same call and is forked by the same servers."""
    events: list[GangEvent] = []
    options = {"max_restarts": 2, "on_event": events.append}
    args = ([1], "SIGKILL", str(tmp_path))
    values = run_gang(dask_client, failing.fail_in, args=args, world_size=2, **options)
    assert [value["total"] for value in values] == [2.0, 2.0]
    for value in values:
        assert value["TORCHELASTIC_RESTART_COUNT"] == "1"
        assert value["TORCHELASTIC_MAX_RESTARTS"] == "2"
    assert attempts_in(events) == [(1, 2), (2, 2)]
    parents = [{path.read_text() for path in tmp_path.glob(f"{n}-*")} for n in (1, 2)]
    assert parents[0] == parents[1]
    said = [event.text for event in events if isinstance(event, LogLine) and event.rank == -1]
    says = "rank 1 on 127.0.0.1 failed in attempt 1: was killed by SIGKILL (9)"
    assert any(says in text for text in said)
    assert any("restart 1 of 2" in text for text in said)


def kill_when_all_hold(folder: Path, num_ranks: int, victim: Callable[[], int]) -> None:
    """Kill a process as soon as all ranks of the first attempt hold."""
    pids_in(folder, num_ranks)
    os.kill(victim(), signal.SIGKILL)


@pytest.mark.long
def test_a_worker_lost_for_good_leaves_a_smaller_gang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `min_world_size=1` the remaining rank keeps training."""
    monkeypatch.setattr(restarts, "FULL_SIZE_S", 1.0)
    events: list[GangEvent] = []
    call = {"args": (str(tmp_path),), "world_size": 2, "max_restarts": 1, "min_world_size": 1}
    call |= {"workers_timeout_s": HANG_S, "on_event": events.append}
    with own_cluster(1) as (cluster, client), ThreadPoolExecutor(1) as pool:
        gang = pool.submit(run_gang, client, failing.hold_in_first, **call)
        wait_until(lambda: len(events) >= 3 and {*map(type, events)} == {LogLine, Waiting})
        said = list(events)  # once it has come, more lines about it may follow
        with extra_worker(cluster, 2) as worker:
            kill_when_all_hold(tmp_path, 2, lambda: worker.pid)
            assert gang.result(HANG_S) == [1]
    assert attempts_in(events) == [(1, 2), (2, 1)]
    says = r"waiting for workers: 1 of 2 after \d+ s \(limit 120 s\)"
    assert all(re.fullmatch(says, getattr(event, "text", "")) for event in said), said


@pytest.mark.extended
def test_a_worker_lost_for_good_ends_a_gang_of_fixed_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is the cause of the error that names the lack of workers."""
    monkeypatch.setattr(restarts, "FULL_SIZE_S", 1.0)
    call = {"args": (str(tmp_path),), "world_size": 2, "max_restarts": 1, "workers_timeout_s": 3.0}
    with (
        own_cluster(1) as (cluster, client),
        extra_worker(cluster, 2) as worker,
        ThreadPoolExecutor(1) as pool,
    ):
        killed = pool.submit(kill_when_all_hold, tmp_path, 2, lambda: worker.pid)
        with pytest.raises(NotEnoughWorkersError, match="have 1, need 2") as caught:
            run_gang(client, failing.hold_in_first, **call)
        assert isinstance(caught.value.__cause__, WorkerLostError)
        killed.result()


@pytest.mark.extended
def test_a_worker_that_comes_back_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the nanny has restarted the killed worker, the gang has its full size again."""
    monkeypatch.setattr(restarts, "FULL_SIZE_S", HANG_S)  # a loaded machine needs more than 10 s
    events: list[GangEvent] = []
    options = {"max_restarts": 1, "min_world_size": 1, "on_event": events.append}
    with own_cluster(2) as (_, client), ThreadPoolExecutor(1) as pool:
        pids = client.run(os.getpid)
        killed = pool.submit(kill_when_all_hold, tmp_path, 2, lambda: max(pids.items())[1])
        args = (str(tmp_path),)
        assert run_gang(client, failing.hold_in_first, args=args, **options) == [2, 2]
        assert attempts_in(events) == [(1, 2), (2, 2)]
        killed.result()


def test_identical_failures_are_reported_once(
    dask_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same error of all ranks is one line that names all of them as causes."""
    monkeypatch.setattr(root_cause, "IDENTICAL_S", 60.0)  # ends as soon as all ranks have failed
    says = r"ranks 0, 1 on 127\.0\.0\.1 failed in attempt 1: ValueError: bad lr"
    with pytest.raises(RankFailedError, match=says) as caught:
        run_gang(dask_client, failing.fail_everywhere, world_size=2)
    assert "as a consequence" not in str(caught.value)


@pytest.mark.extended
def test_a_caller_that_was_silent_while_its_ranks_returned_tries_again(
    dask_cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that lost their caller end the ranks; that isn't a cancel, which is never retried."""
    # More than TURN_S, or the caller would take the agents for lost.
    monkeypatch.setenv("DASK_PREFECT_TORCH_DDP__LIVENESS_TIMEOUT_S", "6")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:
        given = dask_cluster.scheduler_address, str(tmp_path)
        gang = pool.submit(call_releasable_gang, *given)
        ranks = pids_in(tmp_path, 2, of=gang)
        caller = psutil.Process(int((tmp_path / "caller").read_text()))
        caller.suspend()
        try:
            (tmp_path / "release").touch()
            wait_until(lambda: not alive(ranks))
        finally:
            caller.resume()
        assert gang.result(HANG_S) == [1, 1]
